"""Peers: what an endpoint knows of the others, and the lock that guards it."""

import threading
from collections import deque

from rlinf.comm.address import WorkerId
from rlinf.comm.deferred import Deferred
from rlinf.comm.errors import PeerLost
from rlinf.comm.frame import Outgoing
from rlinf.comm.lifecycle import Down, Lifecycle
from rlinf.comm.registry import WorkerRecord
from rlinf.comm.transports.base import Link
from rlinf.comm.window import LETTER_BYTES, Window


class Peer:
    """One peer: its state machine, its connection (if any), and what waits for it.

    Attributes:
        id: Its name.
        name: The same as text, for messages.
        receiving: What a receive from it is called in messages.
        machine: Where the connection stands.
        link: The connection, while it is up.
        waiting: Frames that cannot be sent yet.
        window: Of the current connection.
        record: What the registry last said of it.
        because: Why the connection goes over what it goes over.
        sent, sent_bytes: Payload to it; guarded by the lock.
        reported, reported_bytes: Payload from it, but for what went past the mailbox.
        said: That reason, once it is in the log.
        tried: Transports that did not connect.
        asked: Whether it was asked for credit.
        seen: How much payload there had been when it was last looked whether it is idle.
        down: How its last connection ended, if it has none now.
        told: The incarnation whose loss a receive was told of.
    """

    __slots__ = (
        "asked",
        "because",
        "down",
        "id",
        "link",
        "machine",
        "name",
        "receiving",
        "record",
        "reported",
        "reported_bytes",
        "said",
        "seen",
        "sent",
        "sent_bytes",
        "told",
        "tried",
        "waiting",
        "window",
    )

    def __init__(self, id: WorkerId, *, first: bool, window_bytes: int) -> None:
        self.id = id
        self.name = str(id)
        self.receiving = f"recv from {id}"
        self.machine = Lifecycle(first=first)
        self.link: Link | None = None
        self.waiting: deque[Outgoing] = deque()
        self.window = Window(window_bytes)
        self.record: WorkerRecord | None = None
        self.because = ""
        self.said = ""
        self.sent = self.sent_bytes = 0
        self.reported = self.reported_bytes = 0
        self.tried: set[str] = set()
        self.asked = False
        self.seen = 0
        self.down: Down | None = None
        self.told = 0

    @property
    def received(self) -> int:
        """Messages, requests and replies from it."""
        return self.reported + self.window.taken + self.window.kept

    @property
    def received_bytes(self) -> int:
        """Their size."""
        taken_bytes = self.window.passed - self.window.taken * LETTER_BYTES
        return self.reported_bytes + taken_bytes + self.window.kept_bytes

    def begin(self, window: Window) -> None:
        """A new connection, with a window of its own."""
        self.reported, self.reported_bytes = self.received, self.received_bytes
        self.window = window

    def epoch(self) -> int:
        """The newest incarnation heard of."""
        return max(self.machine.epoch, self.record.epoch if self.record else 0)


class Peers:
    """All peers and links of one endpoint.

    Attributes:
        lock: Guards all of it.
        deferred: To be run by whoever has let go of the lock.
        links: Every link there is, by number, whether it has a peer yet or not.
    """

    def __init__(self, me: WorkerId, window_bytes: int) -> None:
        self.lock = threading.RLock()
        self.deferred = Deferred()
        self.links: dict[int, Link] = {}
        self.by_link: dict[int, Peer] = {}
        self._me = me
        self._window_bytes = window_bytes
        self._by_id: dict[WorkerId, Peer] = {}

    def get(self, id: WorkerId) -> Peer:
        """The peer of this name, whether it exists or not."""
        peer = self._by_id.get(id)
        if peer is None:
            with self.lock:
                peer = self._by_id.get(id)
                if peer is None:
                    peer = Peer(id, first=self._me < id, window_bytes=self._window_bytes)
                    self._by_id[id] = peer
        return peer

    def all(self) -> list[Peer]:
        """All peers ever named."""
        with self.lock:
            return list(self._by_id.values())


def lost_error(peer: WorkerId, epoch: int, reason: str) -> PeerLost:
    """The error of whatever needed a peer that is gone."""
    return PeerLost(
        f"{peer} (epoch {epoch}) is gone: {reason}. If it is restarted under this name, "
        "the next operation reaches the new one",
        peer=peer,
        epoch=epoch,
    )

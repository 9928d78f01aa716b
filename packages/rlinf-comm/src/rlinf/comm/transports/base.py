"""What a transport is: it listens at an address, dials one, and its links carry frames.

A link begins unauthenticated: it carries handshake frames only, until its owner says otherwise.
Whatever a link reports, it reports on the thread that dispatches for its endpoint.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rlinf.comm.address import Address, WorkerId
from rlinf.comm.config import CommConfig
from rlinf.comm.deferred import Deferred
from rlinf.comm.device import Device
from rlinf.comm.errors import CommError
from rlinf.comm.frame import MESSAGE, Incoming, Outgoing
from rlinf.comm.progress import Loop
from rlinf.comm.window import Window

_numbers = itertools.count(1)


class LinkOwner(Protocol):
    """Who a link reports to."""

    def on_accept(self, link: "Link") -> None:
        """A peer has dialled; it will have to authenticate."""

    def on_open(self, link: "Link") -> None:
        """A dialled link is up, a handshake may begin."""

    def on_frame(self, link: "Link", frame: Incoming) -> None:
        """A frame has arrived whole."""

    def on_credit(self, link: "Link") -> None:
        """The peer has received something, and messages wait for that."""

    def on_room(self) -> None:
        """There is room again for what a transport could not `stage`."""

    def on_lost(self, link: "Link", reason: str) -> None:
        """The link is gone; all that came before was reported. Called once."""


class Desk(Protocol):
    """Whom a thread receives for that reads a link itself."""

    def is_free(self, tag: int) -> bool:
        """Whether nothing of this tag has come before, and nobody has asked for it before."""

    def first(self, link: "Link", frame: Incoming) -> Incoming:
        """The first message of a frame; others are kept for the next receives."""


class Link(ABC):
    """One connection to one peer.

    Attributes:
        copies: Whether `send` (after `stage`) has copied all large buffers.
        number: Unique in the process.
        transport: Name of the transport it belongs to.
        dialled: Whether this side made it.
        peer: Who is at the other end; set by the handshake.
        epoch: The incarnation of the peer; set by the handshake.
        authenticated: Whether the handshake is done.
        state: What its owner remembers of it.
        window: What was sent and not received yet; `bind` sets it.
        clean: Whether the peer has said goodbye.
        failure: What is wrong with the peer, where dialling it again is of no use.
        unsent: Frames that had not left whole when the link was lost.
    """

    transport: ClassVar[str]
    copies: ClassVar[bool] = False

    def __init__(self, owner: LinkOwner, *, dialled: bool) -> None:
        self.number = next(_numbers)
        self.owner = owner
        self.dialled = dialled
        self.peer: WorkerId | None = None
        self.epoch = 0
        self.authenticated = False
        self.state: object = None
        self.window = Window(0)
        self.clean = False
        self.failure: CommError | None = None
        self.unsent: list[Outgoing] = []

    def authenticate(self) -> None:
        """The handshake is done: frames of every kind and size may come from now on."""
        self.authenticated = True

    def bind(self, window: Window) -> None:
        """Take credit from this window into each frame that leaves, and give it what comes."""
        self.window = window

    def take(
        self, tag: int, desk: Desk, begun: float, limit_s: float | None
    ) -> bytes | Incoming | None:
        """Receive the next message of a tag on the calling thread, if it comes within a moment.

        The bytes that are the whole message, or its frame; None where it is to be waited for in
        the usual way. The window has been told. Any thread may call this, at the time `begun`.
        """
        return None

    def stage(self, frame: Outgoing) -> bool:
        """Take what the frame carries into memory of the transport, if it has such.

        False where there is no room for it at present; `on_room` follows. May take time.

        Raises:
            PoolExhausted: There never will be.
        """
        if frame.on_device:
            frame.lower()
        return True

    @abstractmethod
    def send(self, frame: Outgoing) -> bool:
        """Send or queue a frame; never blocks. False if the link is gone.

        With `frame.done` set, buffers are referred to until it completes; without, they may be
        changed as soon as this returns (what could not be written at once has been copied).
        """

    def send_small(self, tag: int, flags: int, header: bytes) -> bool:
        """`send` for a message without buffers: most are, and few of them ever become a frame."""
        return self.send(small(tag, flags, header))

    @abstractmethod
    def queued(self) -> bool:
        """Whether frames are still waiting to leave."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Drop the connection now; `on_lost` is called (soon) unless it was lost before."""

    def abandon(self) -> None:  # noqa: B027 - there may be nothing to let go of
        """In a forked child: let go of the parent's descriptors without a word to the peer."""


def small(tag: int, flags: int, header: bytes) -> Outgoing:
    """The frame of a message without buffers."""
    frame = Outgoing(MESSAGE, header, tag=tag)
    frame.flags = flags
    return frame


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a transport is given by its endpoint.

    Attributes:
        name: Of the endpoint, unique on this host; for names of sockets and threads.
        loop: Where to register descriptors and post callbacks.
        config: The endpoint's settings.
        owner: Whom links report to.
        memory: Private memory for what arrives.
        deferred: Where links put what calls back into the unknown; `send` may hold locks.
        device: What the worker computes on.
    """

    name: str
    loop: Loop
    config: CommConfig
    owner: LinkOwner
    deferred: Deferred
    memory: Callable[[int], memoryview]
    device: Device = field(default_factory=Device)


class Transport(ABC):
    """One way of moving frames; made once an endpoint.

    Class attributes:
        name: What the entry point, `backend_priority` and `Choice` call it.
        scheme: Of the addresses it listens at.
        kinds: Kinds of device whose memory it moves without the host.
    """

    name: ClassVar[str]
    scheme: ClassVar[str]
    kinds: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings

    @classmethod
    def missing(cls) -> str | None:
        """Why this transport cannot work on this host; None where it can."""
        return None

    @classmethod
    def unsuited(cls, device: Device, config: CommConfig) -> str | None:
        """Why an endpoint on this device, with these settings, does without it."""
        return None

    @abstractmethod
    def listen(self) -> Address:
        """Begin to accept; the address is what peers dial (a port of 0 has become real)."""

    @abstractmethod
    def dial(self, address: Address) -> Link:
        """Begin to connect; `owner.on_open` or `owner.on_lost` will follow. Never blocks."""

    def shortage(self) -> str | None:
        """The arithmetic, where messages wait because `stage` has found no room."""
        return None

    def allocate(self, nbytes: int) -> memoryview | None:
        """Writable memory that can be sent without a copy; None where there is no such thing."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop listening and give everything back. Links are closed by their owner before."""

    def abandon(self) -> None:  # noqa: B027 - there may be nothing to let go of
        """In a forked child: let go of the parent's descriptors."""

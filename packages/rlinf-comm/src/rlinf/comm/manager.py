"""ConnectionManager: carries out what `lifecycle` decides. One connection a peer, made lazily.

Everything that changes a connection happens under one lock; callbacks to the endpoint (`Upward`)
happen without it.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf.comm import lifecycle as life
from rlinf.comm.address import WorkerId
from rlinf.comm.errors import (
    AuthenticationError,
    CommError,
    ConnectTimeout,
    NoTransport,
    PeerLost,
    PoolExhausted,
    StaleEpoch,
    Timeout,
)
from rlinf.comm.frame import BYE, CREDIT, IDLE, MESSAGE, PAYLOAD, PING, WANT, Incoming, Outgoing
from rlinf.comm.handle import Handle
from rlinf.comm.handshake import Party, Refusal
from rlinf.comm.lifecycle import Lifecycle
from rlinf.comm.progress import Loop
from rlinf.comm.registry import WorkerRecord
from rlinf.comm.selection import Choice, choose
from rlinf.comm.shake import Greeter
from rlinf.comm.transports.base import Link, Transport
from rlinf.comm.transports.inproc import loopback
from rlinf.comm.window import Window

log = logging.getLogger(__name__)


class Upward(Protocol):
    """What the endpoint is told; on the dispatching thread, without locks."""

    def payload(self, link: Link, frame: Incoming) -> None:
        """A message, request, reply or error has come."""

    def connected(self, link: Link, because: str) -> None:
        """A peer is connected."""

    def disconnected(self, peer: WorkerId, down: life.Down) -> None:
        """A peer is not any more."""

    def unreachable(self, peer: WorkerId, error: BaseException) -> None:
        """A peer could not be connected to."""


@dataclass(frozen=True, slots=True)
class Outfit:
    """What a manager works with."""

    me: WorkerRecord
    token: bytes
    loop: Loop
    find: Callable[[WorkerId, bool], Handle[WorkerRecord]]
    unknown: Callable[[WorkerId, float | None], CommError]
    upward: Upward
    window_bytes: int
    timeout_s: float
    priority: tuple[str, ...]


class Peer:
    """One peer: its state machine, its connection (if any), and what waits for it."""

    def __init__(self, id: WorkerId, *, first: bool, window_bytes: int) -> None:
        self.id = id
        self.machine = Lifecycle(first=first)
        self.link: Link | None = None
        self.waiting: deque[Outgoing] = deque()
        self.window = Window(window_bytes)
        self.record: WorkerRecord | None = None
        self.because = "the peer dialled"
        self.tried: set[str] = set()
        self.asked = False
        self.activity = 0
        self.down: life.Down | None = None


class ConnectionManager:
    """See the module. `post` may be called from any thread."""

    def __init__(self, outfit: Outfit) -> None:
        self._outfit = outfit
        self.me = outfit.me
        self._loop = outfit.loop
        self._transports: dict[str, Transport] = {}
        self._lock = threading.RLock()
        self._peers: dict[WorkerId, Peer] = {}
        self._links: dict[int, Peer] = {}
        self._open: dict[int, Link] = {}
        self._after: deque[Callable[[], None]] = deque()
        self._greeter = Greeter(self._party, outfit.token, self, outfit.loop, outfit.timeout_s)
        self.closing = False

    def use(self, transports: Mapping[str, Transport]) -> None:
        """The transports to dial with."""
        self._transports = dict(transports)

    def _party(self) -> Party:
        return Party(self.me.id, self.me.epoch)

    # -- sending, from any thread --------------------------------------------------------------

    def post(self, to: WorkerId, frame: Outgoing) -> None:
        """Send now, or as soon as there is a connection and room in the peer's window."""
        ready = self._stage(self.link_to(to), frame)
        with self._lock:
            peer = self._peers.get(to) or self._new(to)
            if not (ready and self._try(peer, frame)):
                if frame.done is None:
                    frame.own()
                peer.waiting.append(frame)
                if peer.link is None:
                    self._step(peer, life.Wanted())
                else:
                    self._flush(peer)
        self._run_after()

    def try_post(self, to: WorkerId, frame: Outgoing) -> bool:
        """Send if it can be sent now; else nothing has happened."""
        if not self._stage(self.link_to(to), frame):
            return False
        with self._lock:
            peer = self._peers.get(to)
            return peer is not None and self._try(peer, frame)

    def reply(self, link: Link, frame: Outgoing) -> None:
        """Answer on the link a request came by, or by another to the same incarnation."""
        assert link.peer is not None
        if self._stage(link, frame) and link.send(frame):
            return
        with self._lock:
            peer = self._peers.get(link.peer)
            if peer is not None and peer.link is not None and peer.link.epoch == link.epoch:
                frame.own()
                peer.waiting.append(frame)
                self._flush(peer)
        self._run_after()

    def on_room(self) -> None:
        """What waited for room in a transport's memory may go on."""
        with self._lock:
            for peer in self._peers.values():
                if peer.waiting and peer.link is not None:
                    self._flush(peer)
        self._run_after()

    def _stage(self, link: Link | None, frame: Outgoing) -> bool:
        return link is None or not frame.buffers or link.stage(frame)

    def _stage_waiting(self, link: Link, frame: Outgoing) -> bool:
        """For a frame nobody waits in line for: an error goes to its handle."""
        try:
            return self._stage(link, frame)
        except CommError:
            if frame.cares is not None:
                self._after.append(functools.partial(_fail_one, frame.cares, error))
            return False

    def want(self, to: WorkerId) -> None:
        """Connect, with nothing to send: to learn of the peer's death."""
        with self._lock:
            peer = self._peers.get(to) or self._new(to)
            if peer.link is None:
                self._step(peer, life.Wanted())
        self._run_after()

    def link_to(self, to: WorkerId) -> Link | None:
        """The connection to a peer, if there is one."""
        peer = self._peers.get(to)
        return None if peer is None else peer.link

    def lost(self, to: WorkerId) -> PeerLost | None:
        """The error for a peer that was connected once and is not to be had any more."""
        peer = self._peers.get(to)
        if peer is None or peer.link is not None or peer.down is None:
            return None
        return self.lost_error(to, peer.down.epoch, peer.down.reason)

    def consumed(self, source: WorkerId, nbytes: int) -> None:
        """A message of this peer's was received; its window opens accordingly."""
        with self._lock:
            peer = self._peers.get(source)
            if peer is not None and peer.window.consume(nbytes) and peer.link is not None:
                peer.link.send(Outgoing(CREDIT))

    def _try(self, peer: Peer, frame: Outgoing) -> bool:
        link = peer.link
        if link is None:
            return False
        if frame.kind == MESSAGE and (peer.waiting or not peer.window.take(frame.nbytes)):
            return False
        peer.activity += 1
        return link.send(frame)

    def _flush(self, peer: Peer) -> None:
        link = peer.link
        kept: deque[Outgoing] = deque()
        while peer.waiting and link is not None:
            frame = peer.waiting.popleft()
            if frame.cares is not None and frame.cares.done():
                continue
            blocked = (
                (frame.kind == MESSAGE and bool(kept))
                or not self._stage_waiting(link, frame)
                or (frame.kind == MESSAGE and not peer.window.take(frame.nbytes))
            )
            if blocked or not link.send(frame):
                kept.append(frame)
        peer.waiting = kept
        if not kept:
            peer.asked = False
        elif link is not None and not peer.asked:
            peer.asked = True
            link.send(Outgoing(WANT))

    # -- carrying out --------------------------------------------------------------------------

    def _new(self, id: WorkerId) -> Peer:
        first = self.me.id < id
        peer = Peer(id, first=first, window_bytes=self._outfit.window_bytes)
        self._peers[id] = peer
        if id == self.me.id:
            self._loop_back(peer)
        return peer

    def _loop_back(self, peer: Peer) -> None:
        """What this endpoint sends to itself goes out and in by the same link."""
        link = loopback(self._loop, self)
        link.peer, link.epoch = peer.id, self.me.epoch
        link.credit = peer.window.collect
        self._open[link.number], self._links[link.number] = link, peer
        peer.link = link

    def _step(self, peer: Peer, event: life.Event) -> None:
        """Under the lock."""
        for command in peer.machine.step(event, time.monotonic()):
            self._carry_out(peer, command)

    def _carry_out(self, peer: Peer, command: life.Command) -> None:
        match command:
            case life.Resolve(fresh):
                self._resolve(peer, fresh=fresh)
            case life.Dial(epoch):
                self._dial(peer, epoch)
            case life.RetryAt(when):
                self._loop.call_later(
                    when - time.monotonic(), lambda: self._later(peer, life.RetryDue())
                )
            case life.Accept(number):
                self._greeter.welcome(self._open[number])
            case life.Refuse(number, code):
                self._greeter.refuse(self._open[number], code, peer.machine.epoch, self.me.id)
            case life.Drop(number, reason):
                if number in self._open:
                    self._open[number].close(reason)
            case life.Ping(number):
                if number in self._open:
                    self._open[number].send(Outgoing(PING))
            case life.Up(number, epoch):
                self._up(peer, self._open[number], epoch)
            case life.Down():
                self._down(peer, command)
            case life.Fail(reason, error):
                self._fail(peer, reason, error)

    def _later(self, peer: Peer, event: life.Event) -> None:
        with self._lock:
            if not self.closing:
                self._step(peer, event)
        self._run_after()

    def _run_after(self) -> None:
        while self._after:
            self._after.popleft()()

    def _resolve(self, peer: Peer, *, fresh: bool) -> None:
        found = self._outfit.find(peer.id, fresh)

        def resolved(handle: Handle[WorkerRecord]) -> None:
            error = handle.exception()
            if error is not None:
                self._later(peer, life.Unresolved(error))
                return
            peer.record = handle.result(0.0)
            self._later(peer, life.Resolved(peer.record.epoch))

        if found.done():
            self._after.append(lambda: resolved(found))
        else:
            found.add_done_callback(lambda handle: self._loop.post(lambda: resolved(handle)))

    def _dial(self, peer: Peer, epoch: int) -> None:
        record = peer.record
        assert record is not None
        addresses = {address.scheme: address for address in record.addresses}
        available = {n for n, t in self._transports.items() if t.scheme in addresses}
        try:
            choice = self._choose(peer, record, available)
            peer.because = choice.because
            peer.tried.add(choice.transport)
            transport = self._transports[choice.transport]
            link = transport.dial(addresses[transport.scheme])
        except (OSError, CommError) as error:
            final = isinstance(error, NoTransport)
            failed = life.DialFailed(0, error, final)
            self._after.append(lambda: self._later(peer, failed))
            return
        self._open[link.number] = link
        self._links[link.number] = peer
        peer.machine.dialled(link.number)
        self._greeter.dial(link, Party(peer.id, epoch))

    def _choose(self, peer: Peer, record: WorkerRecord, available: set[str]) -> Choice:
        """The best transport that has not failed to connect; once all have, the best again."""
        try:
            return choose(self.me, record, available - peer.tried, self._outfit.priority)
        except NoTransport:
            if not peer.tried:
                raise
        peer.tried.clear()
        return choose(self.me, record, available, self._outfit.priority)

    def _up(self, peer: Peer, link: Link, epoch: int) -> None:
        link.epoch = epoch
        peer.window = Window(self._outfit.window_bytes)
        peer.link = link
        peer.down = None
        peer.asked = False
        peer.tried.clear()
        self._links[link.number] = peer
        window = peer.window
        link.credit = window.collect
        self._flush(peer)
        because = peer.because if link.dialled else f"{link.transport}: the peer chose"
        log.debug("%s - %s: %s", self.me.id, peer.id, because)
        self._after.append(lambda: self._outfit.upward.connected(link, because))

    def _down(self, peer: Peer, down: life.Down) -> None:
        peer.link = None
        peer.down = None if down.idle else down
        if down.idle:
            if peer.waiting:
                self._step(peer, life.Wanted())
        else:
            error = self.lost_error(peer.id, down.epoch, down.reason)
            self._fail_waiting(peer, error)
        self._after.append(lambda: self._outfit.upward.disconnected(peer.id, down))

    def _fail(self, peer: Peer, reason: str, error: BaseException | None) -> None:
        if error is None:
            error = self.lost_error(peer.id, peer.machine.epoch, reason)
        self._fail_waiting(peer, error)
        self._after.append(lambda: self._outfit.upward.unreachable(peer.id, error))

    def _fail_waiting(self, peer: Peer, error: BaseException) -> None:
        failed, peer.waiting = peer.waiting, deque()

        def fail() -> None:
            for frame in failed:
                if frame.cares is not None:
                    frame.cares.set_error(error)

        self._after.append(fail)

    def lost_error(self, peer: WorkerId, epoch: int, reason: str) -> PeerLost:
        """The error of whatever needed a peer that is gone."""
        return PeerLost(
            f"{peer} (epoch {epoch}) is gone: {reason}. If it is restarted under this name, "
            "the next operation reaches the new one",
            peer=peer,
            epoch=epoch,
        )

    # -- outcomes of handshakes ----------------------------------------------------------------

    def proved(self, link: Link, peer: Party) -> None:
        """A peer that dialled us is who it says."""
        with self._lock:
            if self.closing:
                self._greeter.refuse(link, Refusal.CLOSING, self.me.epoch, self.me.id)
                return
            known = self._peers.get(peer.id) or self._new(peer.id)
            self._step(known, life.Proved(link.number, peer.epoch))
        self._run_after()

    def welcomed(self, link: Link, epoch: int) -> None:
        """The peer we dialled has accepted."""
        self._later(self._links[link.number], life.Welcomed(link.number, epoch))

    def refused(self, link: Link, code: Refusal, text: str) -> None:
        """The peer we dialled has refused."""
        peer = self._links[link.number]
        error: CommError | None = None
        if code is Refusal.TOKEN:
            error = AuthenticationError(text, peer=peer.id)
        elif code is Refusal.STALE:
            error = StaleEpoch(text, peer=self.me.id)
        if error is not None:
            self._later(peer, life.DialFailed(link.number, error, final=True))
        else:
            self._later(peer, life.Refused(link.number, code, text))

    def failed(self, link: Link, error: BaseException, *, final: bool) -> None:
        """The link we dialled came to nothing."""
        self._later(self._links[link.number], life.DialFailed(link.number, error, final))

    # -- what links report ---------------------------------------------------------------------

    def on_accept(self, link: Link) -> None:
        """A peer has dialled."""
        with self._lock:
            self._open[link.number] = link
        self._greeter.accept(link)

    def on_open(self, link: Link) -> None:
        """A link of ours is connected."""
        with self._lock:  # whoever dialled may not be done with noting it
            self._greeter.opened(link)

    def on_frame(self, link: Link, frame: Incoming) -> None:
        """Sort a frame: payload goes up, the rest is for us."""
        peer = self._links.get(link.number)
        if peer is None or self._greeter.is_shaking(link):
            self._greeter.frame(link, frame)
            return
        if frame.credit:
            with self._lock:
                peer.window.give(frame.credit)
                if peer.waiting:
                    self._flush(peer)
        if frame.kind in PAYLOAD:
            peer.activity += 1
            self._outfit.upward.payload(link, frame)
        elif frame.kind == WANT:
            with self._lock:
                peer.window.eager = True
                link.send(Outgoing(CREDIT))
        elif frame.kind == BYE:
            link.clean = True
        elif frame.kind == IDLE:
            self._idle(peer, link)

    def on_lost(self, link: Link, reason: str) -> None:
        """A link is gone."""
        with self._lock:
            self._open.pop(link.number, None)
        if self._greeter.lost(link, reason):
            self._links.pop(link.number, None)
            return
        peer = self._links.pop(link.number, None)
        if peer is None:
            return
        said = "it closed its endpoint" if link.clean else reason
        with self._lock:
            self._step(peer, life.LinkLost(link.number, said, link.clean))
        self._run_after()
        error = self.lost_error(peer.id, link.epoch, said)
        for frame in link.unsent:
            if frame.cares is not None:
                frame.cares.set_error(error)

    # -- idle and end --------------------------------------------------------------------------

    def close_idle(self, is_needed: Callable[[WorkerId], bool]) -> None:
        """Close the connections nobody has used since the last call."""
        with self._lock:
            for peer in self._peers.values():
                used, peer.activity = peer.activity, 0
                link = peer.link
                if link is None or used or peer.waiting or link.queued() or is_needed(peer.id):
                    continue
                link.send(Outgoing(IDLE))
                self._step(peer, life.LinkLost(link.number, "idle", clean=True, idle=True))
        self._run_after()

    def _idle(self, peer: Peer, link: Link) -> None:
        """The peer sends no more on this link; answer in kind, then whoever hears last closes."""
        with self._lock:
            if peer.link is link:
                link.send(Outgoing(IDLE))
                self._step(peer, life.LinkLost(link.number, "idle", clean=True, idle=True))
            else:
                link.close("idle")
        self._run_after()

    def links(self) -> list[Link]:
        """All links there are."""
        with self._lock:
            return list(self._open.values())

    def peers(self) -> list[Peer]:
        """All peers there were."""
        with self._lock:
            return list(self._peers.values())

    def say_goodbye(self) -> None:
        """No new connections; tell every peer that this is the end."""
        with self._lock:
            self.closing = True
            for peer in self._peers.values():
                if peer.link is not None:
                    peer.link.send(Outgoing(BYE))

    def is_busy(self) -> bool:
        """Whether a message is still to leave (calls are not waited for: nobody hears them)."""
        with self._lock:
            return any(link.queued() for link in self._open.values()) or any(
                frame.kind == MESSAGE and not (frame.cares is not None and frame.cares.done())
                for peer in self._peers.values()
                for frame in peer.waiting
            )

    def why_late(self, to: WorkerId, said: str, operation: str, limit: float | None) -> CommError:
        """The error of an operation that ran into its deadline, by how far the connection got."""
        peer = self._peers.get(to)
        about = {"peer": to, "operation": operation, "timeout_s": limit}
        if peer is None or peer.machine.phase is life.Phase.ABSENT:
            return Timeout(f"{said}; {to} has not connected", **about)
        if peer.machine.phase is life.Phase.RESOLVING:
            return self._outfit.unknown(to, limit)
        if peer.link is None:
            where = ", ".join(map(str, peer.record.addresses)) if peer.record else "no address"
            return ConnectTimeout(f"{said}; cannot connect to {to} at {where}", **about)
        for transport in self._transports.values():
            short = transport.shortage()
            if short is not None and transport.name == peer.link.transport:
                return PoolExhausted(f"{said}; {short}")
        if peer.waiting:
            out = peer.window.outstanding
            return Timeout(
                f"{said}; {to} has {out} bytes it has not received yet "
                f"(window_bytes={self._outfit.window_bytes}): let it receive, or raise the window",
                **about,
            )
        return Timeout(f"{said}; {to} is connected but silent", **about)


def _fail_one(handle: Handle[Any], error: BaseException) -> None:
    handle.set_error(error)

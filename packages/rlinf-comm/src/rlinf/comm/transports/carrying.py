"""carrying: a connection whose large buffers go beside it, over a `Carrier`.

The connection is an ordinary link (tcp, shm). A frame with buffers to be carried goes over it as a
CARRIED frame, without them; both ends then move them, in the order of the frames' numbers, on a
thread a direction that is started when it is first needed. Frames that must not overtake such a
frame (same kind, tag and service) wait behind it at both ends; all others pass.
"""

import itertools
import logging
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from rlinf.comm.address import Address
from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import CARRIED, NOTE, Incoming, Outgoing
from rlinf.comm.handle import Handle
from rlinf.comm.transports.base import Link, LinkOwner, Surroundings, Transport
from rlinf.comm.transports.carrier import Buffer, Carrier, Notes
from rlinf.comm.transports.envelope import Arrival, Envelope, Order
from rlinf.comm.window import Window

log = logging.getLogger(__name__)

DRAIN_S: Final = 2.0
"""How long what is under way may take to arrive after the connection is gone."""


class CarryingLink(Link):
    """See the module.

    Args:
        inner: The connection.
        transport: Which carries what.
    """

    def __init__(self, inner: Link, transport: "CarryingTransport") -> None:
        super().__init__(transport.surroundings.owner, dialled=inner.dialled)
        transport.links.add(self)
        surroundings = transport.surroundings
        self.transport = transport.name  # type: ignore[misc]
        self.inner = inner
        inner.state = self
        self._transport = transport
        self._loop = surroundings.loop
        self._deferred = surroundings.deferred
        self._limit = surroundings.config.max_message_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._leaving: dict[int, Outgoing] = {}
        self._orders: Counter[Order] = Counter()
        self._behind: dict[Order, deque[Arrival | Incoming]] = {}
        self._closed = False
        self._outward = Lane(self, sending=True)
        self._inward = Lane(self, sending=False)

    # -- sending -------------------------------------------------------------------------------

    def authenticate(self) -> None:
        """The handshake is done."""
        super().authenticate()
        self.inner.peer = self.peer
        self.inner.authenticate()

    def bind(self, window: Window) -> None:
        """The credit goes over the connection."""
        super().bind(window)
        self.inner.bind(window)

    def stage(self, frame: Outgoing) -> bool:
        """Sort out what is carried; the rest is for the connection."""
        envelope = self._envelope(frame)
        if envelope is None:
            carried = [at for at, b in enumerate(frame.buffers) if self._transport.carries(b)]
            if not carried:
                return self.inner.stage(frame)
            envelope = frame.beside = Envelope(frame, self, carried)
        return not envelope.buffers or self.inner.stage(envelope)

    def send(self, frame: Outgoing) -> bool:
        """Send now, or behind what it must not overtake; what is carried leaves on its thread."""
        envelope = self._envelope(frame)
        with self._lock:
            if self._closed:
                return False
            if envelope is None and not self._orders[frame.order()]:
                return self.inner.send(frame)
            self._orders[frame.order()] += 1
            self._leaving[id(frame)] = frame
        if frame.done is None:
            frame.own()
        self._outward.put(lambda carrier: self._leave(frame, envelope, carrier))
        return True

    def _envelope(self, frame: Outgoing) -> Envelope | None:
        envelope = frame.beside
        return envelope if isinstance(envelope, Envelope) and envelope.link is self else None

    def _leave(self, frame: Outgoing, envelope: Envelope | None, carrier: Carrier) -> None:
        """On the outward thread."""
        if envelope is None:
            sent = self.inner.send(frame)
        else:
            buffers = envelope.load()
            envelope.address(next(self._numbers), buffers, [carrier.offer(b) for b in buffers])
            assert envelope.done is not None
            parts = itertools.count()
            envelope.done.add_done_callback(lambda _: self._left(frame, parts))
            sent = self.inner.send(envelope)
        self._deferred.run()
        if not sent:
            raise ConnectionError("the connection is gone")
        if envelope is not None:
            for buffer in buffers:
                carrier.send(buffer)
            self._left(frame, parts)
        with self._lock:
            del self._leaving[id(frame)]
            self._orders[frame.order()] -= 1
            if not self._orders[frame.order()]:
                del self._orders[frame.order()]

    def _left(self, frame: Outgoing, parts: Iterator[int]) -> None:
        """A part of a frame has left: the connection's, or the carrier's."""
        done = frame.done
        if next(parts) and done is not None:
            self._loop.post(lambda: _finish(done))

    def queued(self) -> bool:
        """Whether frames are still waiting to leave."""
        return self.inner.queued() or bool(self._leaving)

    # -- receiving, on the dispatching thread --------------------------------------------------

    def arrived(self, frame: Incoming) -> None:
        """A frame of the connection."""
        if not self.authenticated:
            self.owner.on_frame(self, frame)
        elif frame.kind == NOTE:
            lane = self._inward if frame.tag else self._outward
            lane.heard(frame.header)
        elif frame.kind == CARRIED:
            arrival = Arrival(frame, self._limit)
            self._behind.setdefault(arrival.order, deque()).append(arrival)
            self._inward.put_numbered(arrival.number, lambda carrier: self._fill(arrival, carrier))
        else:
            waiting = self._behind.get((frame.kind, frame.tag, frame.service))
            if waiting is None:
                self.owner.on_frame(self, frame)
            else:
                waiting.append(frame)

    def _fill(self, arrival: Arrival, carrier: Carrier) -> None:
        """On the inward thread."""
        arrival.fill(carrier)
        self._loop.post(lambda: self._complete(arrival))

    def _complete(self, arrival: Arrival) -> None:
        arrival.complete = True
        waiting = self._behind[arrival.order]
        while waiting:
            first = waiting[0]
            if isinstance(first, Arrival) and not first.complete:
                return
            waiting.popleft()
            self.owner.on_frame(self, first.frame if isinstance(first, Arrival) else first)
        del self._behind[arrival.order]

    # -- the end -------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Drop the connection."""
        with self._lock:
            self._closed = True
        self.inner.close(reason)

    def fail(self, error: BaseException) -> None:
        """A carrier failed; from its thread."""
        self._loop.post(lambda: self.close(f"{self.transport}: {error}"))

    def lost(self, reason: str) -> None:
        """The connection is gone: let what has arrived in part arrive, then tell."""
        with self._lock:
            self._closed = True
            unsent = list(self._leaving.values())
        inner = [f.of if isinstance(f, Envelope) else f for f in self.inner.unsent]
        self.inner.unsent.clear()
        self.unsent = list({id(frame): frame for frame in (*inner, *unsent)}.values())
        self.clean = self.clean or self.inner.clean
        self._outward.end(lambda: None)
        told = threading.Event()

        def tell() -> None:
            if not told.is_set():
                told.set()
                self._inward.close()
                self.owner.on_lost(self, reason)

        self._loop.call_later(DRAIN_S, tell)
        self._inward.end(lambda: self._loop.post(tell))

    def stop(self) -> None:
        """The endpoint is closed: let the threads end."""
        self._outward.end(lambda: None)
        self._inward.end(lambda: None)
        self._inward.close()

    def abandon(self) -> None:
        """In a forked child."""
        self.inner.abandon()


def _finish(done: Handle[None]) -> None:
    done.set_result(None)


class Lane:
    """One direction of a link: its carrier and the thread that uses it, both made when needed.

    Args:
        link: Whose.
        sending: Which direction.
    """

    def __init__(self, link: CarryingLink, *, sending: bool) -> None:
        self._link = link
        self._sending = sending
        self._jobs: queue.SimpleQueue[Callable[[Carrier], None] | None] = queue.SimpleQueue()
        self._early: dict[int, Callable[[Carrier], None]] = {}
        self._next = 0
        self._thread: threading.Thread | None = None
        self._carrier: Carrier | None = None
        self._finish: Callable[[], None] = lambda: None
        timeout_s = link._transport.surroundings.config.connection_timeout_s
        self.notes = Notes(self._tell, timeout_s)

    def put(self, job: Callable[[Carrier], None]) -> None:
        """Do this with the carrier, after all that was put before."""
        if self._thread is None:
            name = f"rlinf-{self._link.transport}-{'out' if self._sending else 'in'}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def put_numbered(self, number: int, job: Callable[[Carrier], None]) -> None:
        """The same, in the order of numbers (from 0), whatever the order of the calls.

        Raises:
            ProtocolError: The number has been there before.
        """
        if number < self._next or number in self._early:
            raise ProtocolError(f"carried frame {number} came twice")
        self._early[number] = job
        while self._next in self._early:
            self.put(self._early.pop(self._next))
            self._next += 1

    def heard(self, note: bytes) -> None:
        """A note of the other end, which has begun to make its carrier: begin, too."""
        self.notes.heard(note)
        if not self._sending and self._thread is None:
            self.put(lambda _: None)

    def end(self, finish: Callable[[], None]) -> None:
        """No more jobs; call `finish` when the last is done, or has failed."""
        self.notes.close()
        if self._thread is None:
            finish()
            return
        self._finish = finish
        self._jobs.put(None)
        if self._sending:
            self.close()

    def close(self) -> None:
        """Let the carrier go."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()

    def _run(self) -> None:
        failed = False
        while (job := self._jobs.get()) is not None:
            if failed:
                continue
            try:
                carrier = self._carrier
                if carrier is None:
                    carrier = self._link._transport.make(self.notes, self._sending)
                    self._carrier = carrier
                job(carrier)
            except Exception as error:  # whatever the library underneath raises ends the link
                failed = True
                log.debug("%s: a carrier failed", self._link.transport, exc_info=True)
                self._link.fail(error)
        self.close()
        self._finish()

    def _tell(self, note: bytes) -> None:
        self._link.inner.send(Outgoing(NOTE, note, tag=int(self._sending)))
        self._link._deferred.run()


class CarryingTransport(Transport):
    """A transport over another one's connections.

    Class attributes:
        inner: The transport of the connections.
    """

    inner: type[Transport]

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._inner = self.inner(replace(surroundings, owner=_Between(self)))
        self.dialling = threading.Lock()
        self.links: weakref.WeakSet[CarryingLink] = weakref.WeakSet()

    def carries(self, buffer: Buffer) -> bool:
        """Whether a buffer goes beside the connection."""
        raise NotImplementedError

    def make(self, notes: Notes, sending: bool) -> Carrier:
        """One end of a carrier; blocks until the other end is there, too."""
        raise NotImplementedError

    def listen(self) -> Address:
        """The connection's address, under this scheme."""
        return replace(self._inner.listen(), scheme=self.scheme)

    def dial(self, address: Address) -> Link:
        """Connect."""
        with self.dialling:
            inner = self._inner.dial(replace(address, scheme=self._inner.scheme))
            return CarryingLink(inner, self)

    def shortage(self) -> str | None:
        """Of the connection's transport."""
        return self._inner.shortage()

    def close(self) -> None:
        """Stop listening."""
        self._inner.close()
        for link in list(self.links):
            link.stop()

    def abandon(self) -> None:
        """In a forked child."""
        self._inner.abandon()


class _Between(LinkOwner):
    """Owner of the connections: what they report, their carrying links report."""

    def __init__(self, transport: CarryingTransport) -> None:
        self._transport = transport

    def on_accept(self, link: Link) -> None:
        """A peer has dialled."""
        self._transport.surroundings.owner.on_accept(CarryingLink(link, self._transport))

    def on_open(self, link: Link) -> None:
        """A dialled link is up."""
        with self._transport.dialling:  # whoever dialled may not be done with wrapping it
            outer = _outer(link)
        outer.owner.on_open(outer)

    def on_frame(self, link: Link, frame: Incoming) -> None:
        """A frame has arrived."""
        _outer(link).arrived(frame)

    def on_credit(self, link: Link) -> None:
        """The peer has received something."""
        outer = _outer(link)
        outer.owner.on_credit(outer)

    def on_room(self) -> None:
        """There is room again."""
        self._transport.surroundings.owner.on_room()

    def on_lost(self, link: Link, reason: str) -> None:
        """The connection is gone."""
        with self._transport.dialling:
            outer = _outer(link)
        outer.lost(reason)


def _outer(link: Link) -> CarryingLink:
    assert isinstance(link.state, CarryingLink)
    return link.state

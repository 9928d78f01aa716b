"""Exchange: what an endpoint does with payload, from the manager below to the user above."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf.comm import codec
from rlinf.comm import lifecycle as life
from rlinf.comm.address import WorkerId
from rlinf.comm.errors import CommError, PeerLost
from rlinf.comm.events import Connected, Disconnected, Event, Lost, Received, Sent, Sink
from rlinf.comm.frame import ERROR, MESSAGE, NAMES, REPLY, REQUEST, Incoming, Outgoing
from rlinf.comm.handle import Handle
from rlinf.comm.mailbox import Letter, Mailbox, Source, Wish
from rlinf.comm.manager import ConnectionManager
from rlinf.comm.request import Calls, Request, Services, rebuild
from rlinf.comm.transports.base import Link

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Totals since the endpoint was made."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0


class Exchange:
    """Mailbox, services and calls of one endpoint; told of payload on the dispatching thread."""

    def __init__(self, me: WorkerId, *, allow_pickle: bool) -> None:
        self.me = me
        self.mailbox = Mailbox()
        self.services = Services(me)
        self.calls = Calls()
        self.sinks: list[Sink] = []
        self.counters = Counters()
        self.connections: ConnectionManager
        self._allow_pickle = allow_pickle

    # -- encode and decode ---------------------------------------------------------------------

    def pack(
        self, kind: int, obj: object, *, tag: int = 0, ident: int = 0, service: str = ""
    ) -> Outgoing:
        """Encode an object into a frame."""
        packed = codec.split(obj, allow_pickle=self._allow_pickle)
        return Outgoing(
            kind, packed.header, packed.buffers, tag=tag, ident=ident, service=service.encode()
        )

    def unpack(self, frame: Incoming) -> Any:
        """Decode what a frame carries; arrays are views on its buffers."""
        return codec.join(frame.header, frame.buffers, allow_pickle=self._allow_pickle)

    # -- messages ------------------------------------------------------------------------------

    def open(self, letter: Letter) -> Any:
        """Decode a letter that is being received, and let the sender send on."""
        self._consumed(letter)
        return self.unpack(letter.frame)

    def ask(self, source: Source, tag: int, handle: Handle[Any], *, named: bool) -> None:
        """Complete the handle with the next message; `named`: with (object, source)."""

        def fulfil(letter: Letter) -> bool:
            if handle.done():
                return False
            try:
                obj = self.unpack(letter.frame)
            except CommError as error:
                taken = handle.set_error(error)
            else:
                taken = handle.set_result((obj, letter.source) if named else obj)
            if taken:
                self._consumed(letter)
            return taken

        wish = Wish(source, handle, fulfil)
        letter = self.mailbox.wish(tag, wish)
        if letter is None:
            handle.add_done_callback(lambda _: self.mailbox.forget(tag, wish))
        elif not fulfil(letter):
            self.mailbox.give_back(letter)

    def _consumed(self, letter: Letter) -> None:
        self.connections.consumed(letter.source, letter.frame.nbytes)

    # -- told by the manager -------------------------------------------------------------------

    def payload(self, link: Link, frame: Incoming) -> None:
        """A message, request, reply or error has come."""
        assert link.peer is not None
        self.counters.received += 1
        self.counters.received_bytes += frame.nbytes
        if self.sinks:
            at = time.monotonic()
            what = NAMES[frame.kind]
            self.emit(Received(link.peer, link.epoch, at, what, frame.tag, frame.nbytes))
        if frame.kind == MESSAGE:
            self.mailbox.deliver(Letter(link.peer, link.epoch, frame))
        elif frame.kind == REQUEST:
            self._serve(link, link.peer, frame)
        else:
            self._answered(link.peer, frame)

    def connected(self, link: Link, because: str) -> None:
        """A peer is connected."""
        assert link.peer is not None
        self.emit(Connected(link.peer, link.epoch, time.monotonic(), link.transport, because))

    def disconnected(self, peer: WorkerId, down: life.Down) -> None:
        """A peer is not any more: what waits for it will not come."""
        now = time.monotonic()
        if down.idle:
            self.emit(Disconnected(peer, down.epoch, now))
            return
        self.fail(self.connections.lost_error(peer, down.epoch, down.reason), peer)
        self.emit(Lost(peer, down.epoch, now, down.reason, down.clean))

    def unreachable(self, peer: WorkerId, error: BaseException) -> None:
        """A peer could not be connected to; if it is dead, what waits for it will not come."""
        if isinstance(error, PeerLost):
            self.fail(error, peer)

    def fail(self, error: BaseException, peer: WorkerId | None = None) -> None:
        """Fail the receives and calls that wait for this peer (None: all)."""
        for wish in self.mailbox.wishes(peer):
            wish.handle.set_error(_during(error, "recv"))
        for handle in self.calls.of(peer):
            handle.set_error(_during(error, "call"))

    def emit(self, event: Event) -> None:
        """Tell the sinks; one that raises is reported and does not stop the others."""
        for sink in tuple(self.sinks):
            try:
                sink(event)
            except Exception:
                log.exception("%s: sink %r raised", self.me, sink)

    def sent(self, to: WorkerId, frame: Outgoing) -> None:
        """Count a frame that was handed over."""
        self.counters.sent += 1
        self.counters.sent_bytes += frame.nbytes
        if self.sinks:
            at, what = time.monotonic(), NAMES[frame.kind]
            self.emit(Sent(to, 0, at, what, frame.tag, frame.nbytes))

    # -- calls ---------------------------------------------------------------------------------

    def _serve(self, link: Link, source: WorkerId, frame: Incoming) -> None:
        def answer(kind: int, value: object) -> None:
            reply = self.pack(kind, value, ident=frame.ident)
            self.sent(source, reply)
            self.connections.reply(link, reply)

        service = frame.service.decode(errors="replace")
        try:
            payload = self.unpack(frame)
        except CommError as error:
            Request(service, None, (source, link.epoch), answer).fail(error)
            return
        self.services.handle(Request(service, payload, (source, link.epoch), answer))

    def _answered(self, peer: WorkerId, frame: Incoming) -> None:
        handle = self.calls.get(frame.ident)
        if handle is None:
            return
        try:
            value = self.unpack(frame)
        except CommError as error:
            handle.set_error(error)
            return
        if frame.kind == REPLY:
            handle.set_result(value)
        else:
            assert frame.kind == ERROR
            handle.set_error(rebuild(value, peer))


def _during(error: BaseException, operation: str) -> BaseException:
    """The error as the one of this operation."""
    if not isinstance(error, CommError) or "operation" not in error.FIELDS:
        return error
    values: dict[str, Any] = {**error.attributes, "operation": operation}
    kind: Callable[..., CommError] = type(error)
    return kind(f"{operation}: {error.message}", **values)

"""Exchange: what an endpoint does with payload, from the manager below to the user above."""

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlinf.comm import codec
from rlinf.comm import lifecycle as life
from rlinf.comm.address import WorkerId
from rlinf.comm.bundle import untie
from rlinf.comm.encoding.structure import INT_MAX, INT_MIN
from rlinf.comm.errors import CodecError, CommError, PeerLost
from rlinf.comm.events import Connected, Disconnected, Lost
from rlinf.comm.frame import (
    BARE,
    ERROR,
    MANY,
    MESSAGE,
    NUMBER,
    RAW,
    REPLY,
    REQUEST,
    TEXT,
    Incoming,
    Outgoing,
)
from rlinf.comm.ledger import Ledger
from rlinf.comm.mailbox import Mailbox, Source, Wish
from rlinf.comm.outbox import Outbox
from rlinf.comm.peers import Peer, Peers, lost_error
from rlinf.comm.request import Calls, Request, Services, rebuild
from rlinf.comm.transports.base import Link
from rlinf.comm.window import LETTER_BYTES

RAW_BYTES = 1 << 12
_NUMBER = struct.Struct("<q")
ENCODINGS = {"structured": codec.split}
"""By what `CommConfig.serialization` names."""


class Exchange:
    """Mailbox, services and calls of one endpoint; told of payload on the dispatching thread."""

    def __init__(
        self, me: WorkerId, peers: Peers, *, allow_pickle: bool, serialization: str
    ) -> None:
        self.me = me
        self.mailbox = Mailbox(self._fulfil)
        self.services = Services(me)
        self.calls = Calls()
        self.ledger = Ledger(me, peers.lock)
        self.outbox: Outbox
        self.kinds: frozenset[str] = frozenset()
        self._peers = peers
        self._allow_pickle = allow_pickle
        self._split = ENCODINGS[serialization]

    # -- encode and decode ---------------------------------------------------------------------

    def encode(self, obj: Any) -> tuple[int, bytes, Sequence[memoryview]]:
        """The flags, header and buffers of an object; the simplest ones need no codec."""
        kind = type(obj)
        if kind is bytes and len(obj) <= RAW_BYTES:
            return RAW, obj, ()
        if kind is str and len(obj) <= RAW_BYTES and obj.isascii():
            return TEXT, obj.encode(), ()
        if kind is int and INT_MIN <= obj <= INT_MAX:
            return NUMBER, _NUMBER.pack(obj), ()
        header, buffers = self._split(obj, allow_pickle=self._allow_pickle, kinds=self.kinds)
        return 0, header, buffers

    def pack(
        self, kind: int, obj: object, *, tag: int = 0, ident: int = 0, service: str = ""
    ) -> Outgoing:
        """Encode an object into a frame."""
        flags, header, buffers = self.encode(obj)
        name = service.encode() if service else b""
        frame = Outgoing(kind, header, buffers, tag=tag, ident=ident, service=name)
        frame.flags = flags
        return frame

    def unpack(self, frame: Incoming) -> Any:
        """Decode what a frame carries; arrays are views on its buffers."""
        bare = frame.flags & BARE
        if not bare:
            return codec.join(frame.header, frame.buffers, allow_pickle=self._allow_pickle)
        if bare == RAW:
            return frame.header
        try:
            return frame.header.decode() if bare == TEXT else _NUMBER.unpack(frame.header)[0]
        except (UnicodeDecodeError, struct.error) as error:
            raise CodecError(f"malformed message: {error}") from None

    # -- messages ------------------------------------------------------------------------------

    def open(self, letter: Incoming) -> Any:
        """Decode a letter that is being received, and let the sender send on."""
        if letter.window.consume(letter.nbytes):
            self.outbox.credit(self._peers.get(letter.source))
        return self.unpack(letter)

    def take(self, source: Source, tag: int, most: int, found: list[Any]) -> None:
        """Receive what is there of a source and tag, until `found` has that many messages."""
        while len(found) < most:
            letter = self.mailbox.take_bundle(source, tag, most - len(found))
            if letter is None:
                return
            nbytes = letter.nbytes
            if letter.rest is not None:
                nbytes += (len(letter.rest) - 1) * LETTER_BYTES
                found += letter.rest
            else:
                try:
                    found.append(self.unpack(letter))
                except CommError:
                    if found:  # those first; the error is the next receive's
                        self.mailbox.put_back(letter)
                        return
                    raise
            if letter.window.consume(nbytes):
                self.outbox.credit(self._peers.get(letter.source))

    def ask(self, wish: Wish, tag: int) -> None:
        """Fulfil a wish with the next message."""
        letter = self.mailbox.wish(tag, wish)
        if letter is not None:
            self._fulfil(wish, letter)

    def _fulfil(self, wish: Wish, letter: Incoming) -> bool:
        if wish.done():
            return False
        try:
            obj = self.unpack(letter)
        except CommError as error:
            taken = wish.set_error(error)
        else:
            taken = wish.set_result((obj, letter.source) if wish.named else obj)
        if taken and letter.window.consume(letter.nbytes):
            self.outbox.credit(self._peers.get(letter.source))
        return taken

    # -- told by the manager -------------------------------------------------------------------

    def payload(self, link: Link, peer: Peer, frame: Incoming) -> None:
        """A message, request, reply or error has come."""
        if frame.flags & MANY:
            frame.unfold(untie(frame.header))
        self.ledger.received(peer, link.epoch, frame)
        if frame.kind == MESSAGE:
            frame.source, frame.window = peer.id, link.window
            self.mailbox.deliver(frame)
        elif frame.kind == REQUEST:
            self._serve(link, peer, frame)
        else:
            self._answered(peer.id, frame)

    def connected(self, link: Link, peer: Peer) -> None:
        """A peer is connected."""
        at = time.monotonic()
        self.ledger.emit(Connected(peer.id, link.epoch, at, link.transport, peer.because))

    def disconnected(self, peer: Peer, down: life.Down) -> None:
        """A peer is not any more: what waits for it will not come."""
        now = time.monotonic()
        if down.idle:
            self.ledger.emit(Disconnected(peer.id, down.epoch, now))
            return
        self.lost(peer, lost_error(peer.id, down.epoch, down.reason))
        self.ledger.emit(Lost(peer.id, down.epoch, now, down.reason, down.clean))

    def unreachable(self, peer: Peer, error: BaseException) -> None:
        """A peer could not be connected to; if it is dead, what waits for it will not come."""
        if isinstance(error, PeerLost):
            self.lost(peer, error)

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """Fail what waits for this incarnation: its calls, and its receives if none was told yet.

        The loss of an incarnation is told once: who receives again waits for the next one.
        """
        epoch = error.epoch or 0
        wishes = self.mailbox.wishes_of(peer.id) if peer.told < epoch or not epoch else []
        for wish in wishes:
            peer.told = epoch
            wish.set_error(_during(error, "recv"))
        for handle in self.calls.of(peer.id):
            handle.set_error(_during(error, "call"))

    def fail(self, error: BaseException) -> None:
        """Fail all receives and calls that wait."""
        for wish in self.mailbox.wishes_of():
            wish.set_error(_during(error, "recv"))
        for handle in self.calls.of():
            handle.set_error(_during(error, "call"))

    # -- calls ---------------------------------------------------------------------------------

    def _serve(self, link: Link, peer: Peer, frame: Incoming) -> None:
        source = (peer.id, link.epoch)

        def answer(kind: int, value: object) -> None:
            reply = self.pack(kind, value, ident=frame.ident)
            self.ledger.sent(peer, kind, 0, reply.nbytes)
            self.outbox.reply(link, peer, reply)

        service = frame.service.decode(errors="replace")
        try:
            payload = self.unpack(frame)
        except CommError as error:
            Request(service, None, source, answer).fail(error)
            return
        self.services.handle(Request(service, payload, source, answer))

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

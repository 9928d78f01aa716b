"""Envelope: a frame whose large buffers go beside the connection, on its way out and in.

CARRIED header = number, kind, count, count x (position, nbytes, size of place), places, header
"""

import struct
from typing import Final

from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import CARRIED, PAYLOAD, Incoming, Outgoing
from rlinf.comm.handle import Handle
from rlinf.comm.transports.base import Link
from rlinf.comm.transports.carrier import Buffer, Carrier

_HEAD: Final = struct.Struct("<QHH")
_ROW: Final = struct.Struct("<IQI")

Order = tuple[int, int, bytes]


class Envelope(Outgoing):
    """A frame without the buffers that are carried.

    Attributes:
        of: The frame.
        link: Of which link.
        carried: Positions of the buffers that are carried.
    """

    __slots__ = ("carried", "link", "of")

    def __init__(self, frame: Outgoing, link: Link, carried: list[int]) -> None:
        rest = [b for position, b in enumerate(frame.buffers) if position not in carried]
        super().__init__(
            CARRIED, b"", rest, tag=frame.tag, ident=frame.ident, service=frame.service
        )
        self.flags = frame.flags
        self.of = frame
        self.link = link
        self.carried = carried
        self.done = Handle("envelope")

    def load(self) -> list[Buffer]:
        """What is carried; the rest is taken anew from the frame, which may own copies by now."""
        kept = [b for at, b in enumerate(self.of.buffers) if at not in self.carried]
        self.buffers = tuple(
            old if isinstance(new, OnDevice) else new
            for old, new in zip(self.buffers, kept, strict=True)
        )
        return [self.of.buffers[position] for position in self.carried]

    def order(self) -> Order:
        """That of the frame."""
        return self.of.order()

    def address(self, number: int, buffers: list[Buffer], places: list[bytes]) -> None:
        """Write the header."""
        rows = zip(self.carried, buffers, places, strict=True)
        self.header = b"".join(
            (
                _HEAD.pack(number, self.of.kind, len(places)),
                *(_ROW.pack(at, buffer.nbytes, len(place)) for at, buffer, place in rows),
                *places,
                self.of.header,
            )
        )


class Arrival:
    """A CARRIED frame that has arrived: the frame within, and what is still to come."""

    __slots__ = ("_buffers", "complete", "expected", "frame", "number", "order")

    def __init__(self, outer: Incoming, limit_bytes: int) -> None:
        try:
            self.number, kind, count = _HEAD.unpack_from(outer.header)
            at = _HEAD.size + count * _ROW.size
            self.expected: list[tuple[int, int, bytes]] = []
            for position, nbytes, size in _ROW.iter_unpack(outer.header[_HEAD.size : at]):
                self.expected.append((position, nbytes, outer.header[at : at + size]))
                at += size
        except struct.error as error:
            raise ProtocolError(
                f"a header of carried buffers that makes no sense: {error}"
            ) from None
        total = sum(nbytes for _, nbytes, _ in self.expected)
        if kind not in PAYLOAD or len(self.expected) != count or at > len(outer.header):
            raise ProtocolError("a header of carried buffers that makes no sense")
        if total > limit_bytes:
            raise ProtocolError(
                f"a message of {total} bytes is over max_message_bytes={limit_bytes}"
            )
        self.frame = Incoming(kind, outer.tag, outer.ident, outer.credit, outer.flags)
        self.frame.service = outer.service
        self.frame.buffers = self._buffers = list(outer.buffers)
        self.frame.header = outer.header[at:]
        self.frame.nbytes = len(self.frame.header) + total + sum(b.nbytes for b in outer.buffers)
        self.order: Order = (kind, outer.tag, outer.service)
        self.complete = False

    def fill(self, carrier: Carrier) -> None:
        """Receive what is to come; blocks."""
        for position, nbytes, place in self.expected:
            self._buffers.insert(position, carrier.receive(nbytes, place))

"""Structures sent once a connection: the rest of the time a number stands for one.

A shortened header is a `Header` with the field `slot`: together with a structure it says "and
remember this as number so-and-so", without one "as I said". The sender alone decides what is
remembered; frames of a connection arrive in the order they were sent, so both sides agree.
"""

from collections import OrderedDict
from typing import Final

from rlinf.comm.errors import CodecError

SLOTS: Final = 128
"""How many structures a connection remembers; a number of one varint byte."""

LEAST_BYTES: Final = 24
MOST_BYTES: Final = 1 << 14
"""Structures outside of these sizes are always sent as they are."""

_STRUCTURE: Final = b"\x0a"  # protobuf: field 1, length-delimited
_SLOT: Final = 0x30  # protobuf: field 6, varint


def _cut(header: bytes, at: int) -> int:
    """Where the structure ends that begins at `at`.

    Raises:
        CodecError: There is none.
    """
    if header[at : at + 1] != _STRUCTURE:
        raise CodecError("malformed message: its header does not begin with a structure")
    size = shift = 0
    for index in range(at + 1, min(at + 6, len(header))):
        byte = header[index]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if index + 1 + size > len(header):
                break
            return index + 1 + size
    raise CodecError("malformed message: its header ends within the structure")


class Shortener:
    """The sending side of one connection. Headers must be sent in the order they go through it."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, bytes] = OrderedDict()

    def shorten(self, header: bytes) -> bytes:
        """The header to send instead of one that `split` made; any other stays as it is."""
        try:
            end = _cut(header, 0)
        except CodecError:
            return header
        if not LEAST_BYTES <= end <= MOST_BYTES:
            return header
        structure = header[:end]
        slot = self._slots.get(structure)
        if slot is not None:
            self._slots.move_to_end(structure)
            return slot + header[end:]
        if len(self._slots) < SLOTS:
            slot = bytes((_SLOT, len(self._slots)))
        else:
            _, slot = self._slots.popitem(last=False)
        self._slots[structure] = slot
        return slot + header


class Restorer:
    """The receiving side of one connection."""

    def __init__(self) -> None:
        self._slots: dict[int, bytes] = {}

    def restore(self, header: bytes) -> bytes:
        """The header that went into `Shortener.shorten`.

        Raises:
            CodecError: It refers to a structure that was never sent.
        """
        if not header or header[0] != _SLOT:
            return header
        slot = header[1:2]
        number = slot[0] if slot else SLOTS
        if number >= SLOTS:
            raise CodecError(f"malformed message: structure number {number} of {SLOTS}")
        if header[2:3] == _STRUCTURE:
            end = _cut(header, 2)
            if end > MOST_BYTES + 8:
                raise CodecError(f"malformed message: a structure of {end} bytes to remember")
            self._slots[number] = header[2:end]
            return header[2:]
        structure = self._slots.get(number)
        if structure is None:
            raise CodecError(f"malformed message: structure number {number} was never sent")
        return structure + header[2:]

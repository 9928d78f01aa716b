"""Parcel: an encoded object that stays closed, for whoever only passes it on."""

from typing import Any, Final

from rlinf.comm.encoding.structure import Op
from rlinf.comm.encoding.walk import Walk


class Parcel:
    """An encoded object that stays closed until `open`.

    Inside another object it is a leaf of the codec: its header travels as bytes, its buffers as
    buffers of the message, and it arrives closed again, its buffers views on the received memory.
    So a middleman can hold and forward payload without decoding or copying it. Immutable, but its
    buffers are views on the packed object's memory: they change with it until it is sent.

    Args:
        header: The header that `split` gave.
        buffers: The buffers that `split` gave.
    """

    __slots__ = ("buffers", "header", "nbytes")

    def __init__(self, header: bytes, buffers: tuple[memoryview, ...]) -> None:
        self.header: Final = header
        self.buffers: Final = buffers
        self.nbytes: Final = len(header) + sum([buffer.nbytes for buffer in buffers])

    def __repr__(self) -> str:
        return f"<Parcel of {self.nbytes} bytes in {len(self.buffers)} buffers>"

    def __reduce__(self) -> tuple[type["Parcel"], tuple[Any, ...]]:
        return type(self), (self.header, tuple(bytes(buffer) for buffer in self.buffers))

    @classmethod
    def pack(cls, value: object, *, allow_pickle: bool = True) -> "Parcel":
        """Encode an object.

        Raises:
            CodecError: It cannot be encoded; the message has the path.
        """
        from rlinf.comm.codec import split

        return cls(*split(value, allow_pickle=allow_pickle))

    def open(self, *, allow_pickle: bool = True) -> Any:
        """Decode the object; its arrays are views on the parcel's buffers.

        Raises:
            CodecError: The parcel is malformed.
        """
        from rlinf.comm.codec import join

        return join(self.header, self.buffers, allow_pickle=allow_pickle)


def encode_parcel(walk: Walk, value: Parcel, depth: int) -> None:
    """A parcel, closed."""
    if walk.enter(value, depth):
        walk.program.append(Op.PARCEL)
        walk.numbers.append(len(value.buffers))
        walk.blobs.append(value.header)
        walk.buffers += value.buffers
        walk.leave(value)

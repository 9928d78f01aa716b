"""Bundles: several small messages in one frame. No I/O."""

import itertools
import struct
from collections.abc import Sequence

from rlinf.comm.errors import ProtocolError

SIZE = struct.Struct("<I")


def tie(messages: Sequence[bytes]) -> bytes:
    """The messages as one: their number, their sizes, themselves."""
    sizes = struct.pack(f"<I{len(messages)}I", len(messages), *map(len, messages))
    return sizes + b"".join(messages)


def untie(data: bytes) -> list[bytes]:
    """The messages that `tie` was given.

    Raises:
        ProtocolError: It was not given any.
    """
    if len(data) < SIZE.size:
        raise ProtocolError("a bundle without a number")
    (count,) = SIZE.unpack_from(data)
    start = SIZE.size * (count + 1)
    if not count or start > len(data):
        raise ProtocolError(f"a bundle of {count} messages in {len(data)} bytes")
    sizes = struct.unpack_from(f"<{count}I", data, SIZE.size)
    if start + sum(sizes) != len(data):
        raise ProtocolError(f"a bundle of {start + sum(sizes)} bytes in {len(data)}")
    size = sizes[0]
    if size and sizes.count(size) == count:
        return [data[begin : begin + size] for begin in range(start, len(data), size)]
    ends = itertools.accumulate(sizes, initial=start)
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]

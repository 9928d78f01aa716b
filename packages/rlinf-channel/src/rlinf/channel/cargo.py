"""One item, closed: how it travels and waits without anybody looking inside.

A small item (all of it within `SMALL_BYTES`) is a piece of bytes. It is the bytes of a `bytes`
object itself; or the head of a plain numpy array (dtype and shape) and its elements; or a parcel:
the number of its parts, their sizes, then header and buffers, each padded to 16. The first two cost
no codec, and many alike are closed and opened together. A large item is a `Parcel`, whose buffers
the transport moves by reference where it can.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, repeat
from mmap import PAGESIZE
from operator import attrgetter
from typing import Any

import numpy as np

from rlinf.comm.codec import Parcel
from rlinf.comm.errors import PoolExhausted

SMALL_BYTES = 4096
ALIGN = 16
LINE = 64
SHARED_BYTES = 1 << 18
"""A smaller block is copied again where it is sent, so that it needs no memory of the transport."""
ROW_ITEMS = 64

RAW, SMALL, LARGE, ARRAY, CLAIM = 0, 1, 2, 3, 4
"""Kinds of items: bytes, a parcel in a piece, a parcel, a plain array; or a claim, see `claim`."""

PLAIN_DTYPES = "biufc"
MAX_HEADS = 1024
MAX_DIMENSIONS = 8

_LOOK = attrgetter("dtype", "shape")
_COUNT = struct.Struct("<I")
_PADDING = tuple(bytes(n) for n in range(ALIGN))

Bytes = bytes | bytearray | memoryview
Empty = Callable[[int, type], Any]
"""Memory of so many elements of a type."""

Cargo = tuple[int, int, "Bytes | Parcel"]
"""A closed item: its kind, its size without head and padding, its piece or parcel."""


def pack(value: object, allow_pickle: bool = True) -> Cargo:
    """Close an object. A small one is copied; a large one is still a view on its memory.

    Raises:
        CodecError: It cannot be encoded.
    """
    kind = type(value)
    if kind is bytes and len(value) <= SMALL_BYTES:  # type: ignore[arg-type]
        return RAW, len(value), value  # type: ignore
    if kind is np.ndarray:
        head = _heads.get((value.dtype, value.shape)) or _new_head(value)  # type: ignore
        if head is not None:
            start, size, padding = head
            return ARRAY, size, b"".join((start, value.tobytes(), padding))  # type: ignore
    parcel = Parcel.pack(value, allow_pickle=allow_pickle)
    if parcel.nbytes > SMALL_BYTES:
        return LARGE, parcel.nbytes, parcel
    return SMALL, parcel.nbytes, _flatten(parcel)


def pack_alike(
    values: Sequence[object], empty: Empty
) -> tuple[int, int | list[int], int | list[int], list[Bytes]] | None:
    """Close several small items of one kind together, in a tenth of the time.

    Args:
        values: The items.
        empty: As `Endpoint.empty`: where there is much it is written there at once.

    Returns:
        Their kind; the size of each and the length of its piece, one number where it is the same
        for all; and the pieces, in as many parts as suits. None where they are not alike.
    """
    kinds = set(map(type, values))
    if kinds == {bytes}:
        lengths = set(map(len, values))  # type: ignore[arg-type]
        longest = max(lengths)
        if longest > SMALL_BYTES:
            return None
        if len(lengths) == 1:
            return RAW, longest, longest, _written(values, longest, empty)  # type: ignore
        sizes: list[int] = list(map(len, values))  # type: ignore[arg-type]
        return RAW, sizes, sizes, list(values)  # type: ignore[arg-type]
    if kinds != {np.ndarray} or len(set(map(_LOOK, values))) > 1:
        return None
    head = _new_head(values[0])  # type: ignore[arg-type]
    if head is None:
        return None
    start, size, padding = head
    rows = zip(repeat(start), values, repeat(padding))
    try:
        whole = b"".join(chain.from_iterable(rows))  # type: ignore[arg-type]
    except (BufferError, TypeError):  # one is not in C order
        return None
    return ARRAY, size, len(start) + size + len(padding), [whole]


def _written(values: Sequence[bytes], size: int, empty: Empty) -> list[Bytes]:
    """Pieces of one size, in a block that is sent without a further copy if that is worth it."""
    count = len(values)
    if count * size < SHARED_BYTES:
        return list(values)
    block, row = memoryview(empty(count * size, np.uint8)), _row(size)
    whole = count - count % ROW_ITEMS
    for at in range(0, whole, ROW_ITEMS):
        row.pack_into(block, at * size, *values[at : at + ROW_ITEMS])
    block[whole * size :] = b"".join(values[whole:])
    return [block]


def open_alike(kind: int, size: int, count: int, block: Bytes) -> list[object] | None:
    """Open items of one kind and size that lie together, arrays as views on one copy of them.

    None where that cannot be: they have to be opened one by one.
    """
    if kind == RAW and size:
        row = _row(size)
        end = len(block) - len(block) % row.size
        rest = struct.iter_unpack(f"{size}s", block[end:])
        return list(chain.from_iterable(chain(row.iter_unpack(block[:end]), rest)))
    if kind != ARRAY or not size:
        return None
    rows = np.frombuffer(bytearray(block), np.uint8).reshape(count, -1)
    start = int(rows[0, 0]) * ALIGN
    if not (rows[:, :start] == rows[0, :start]).all():
        return None
    dtype, shape, nbytes = _read_head(rows[0, :start].tobytes())
    if nbytes != size or not shape or start + size > rows.shape[1]:
        return None
    return list(rows[:, start : start + size].view(dtype).reshape(count, *shape))


def open_raw(sizes: Sequence[int], block: Bytes) -> list[object]:
    """Open items of bytes, of different size, that lie together."""
    whole, ends = bytes(block), list(accumulate(sizes, initial=0))
    return [whole[start:end] for start, end in pairwise(ends)]


@lru_cache(maxsize=64)
def _row(size: int) -> struct.Struct:
    """Many items of bytes, to be put in or taken out in one step."""
    return struct.Struct(f"{size}s" * ROW_ITEMS)


def unpack_all(cargos: Iterable[Cargo], allow_pickle: bool = True) -> list[object]:
    """`unpack` of several."""
    return [unpack(cargo, allow_pickle) for cargo in cargos]


def unpack(cargo: Cargo, allow_pickle: bool = True) -> object:
    """Open an item. A small one gets memory of its own; a large one keeps what it arrived in.

    Raises:
        CodecError: It cannot be decoded here.
        ValueError: Its piece is malformed.
    """
    kind, nbytes, content = cargo
    if kind == RAW:
        return bytes(content)  # type: ignore[arg-type]
    if kind == ARRAY:
        return _array(content, nbytes)  # type: ignore[arg-type]
    if isinstance(content, Parcel):
        return content.open(allow_pickle=allow_pickle)
    return _parcel(content).open(allow_pickle=allow_pickle)


def detach(parcels: Sequence[Parcel], empty: Empty) -> list[Parcel]:
    """Large items in memory of their own, made by `empty(nbytes, dtype)`, as `Endpoint.empty`.

    They may wait then, while the originals change; where the transport has shared memory they are
    sent from there without a further copy. They lie in one piece, so that they travel as one.
    """
    total = sum([_room(parcel) for parcel in parcels])
    try:
        block = empty(total, np.uint8)
    except PoolExhausted:  # more than the whole pool, while each item may be less
        if len(parcels) == 1:
            raise
        return [detach([parcel], empty)[0] for parcel in parcels]
    whole, first = memoryview(block), 0
    detached: list[Parcel] = []
    for parcel in parcels:
        at = first
        copies: list[memoryview] = []
        for buffer in parcel.buffers:
            end = at + buffer.nbytes
            np.copyto(block[at:end], np.frombuffer(buffer, np.uint8))
            copies.append(whole[at:end])
            at = end + -end % LINE
        detached.append(Parcel(parcel.header, tuple(copies)))
        first += _room(parcel)
    return detached


def _room(parcel: Parcel) -> int:
    """Bytes of a large item in a block: whole pages, so that whoever has it can write to it."""
    nbytes = sum([buffer.nbytes + -buffer.nbytes % LINE for buffer in parcel.buffers])
    return nbytes + -nbytes % PAGESIZE


Head = tuple[bytes, int, bytes]
"""Of a plain array: what stands before its elements, their bytes, the padding behind."""

_heads: dict[tuple[np.dtype[Any], tuple[int, ...]], Head] = {}
_shapes: dict[bytes, tuple[np.dtype[Any], tuple[int, ...], int]] = {}


def _new_head(array: np.ndarray[Any, Any]) -> Head | None:
    """The head of arrays like this one; None if it does not travel as one.

    The head's first byte is its own length in units of 16 bytes.
    """
    dtype, shape, nbytes = array.dtype, array.shape, array.nbytes
    if nbytes > SMALL_BYTES or dtype.kind not in PLAIN_DTYPES or len(shape) > MAX_DIMENSIONS:
        return None
    name = dtype.str.encode()
    parts = struct.pack(f"<BBB{len(shape)}I", 0, len(name), len(shape), *shape) + name
    start = bytes([-(-len(parts) // ALIGN)]) + parts[1:] + _PADDING[-len(parts) % ALIGN]
    head = start, nbytes, _PADDING[-nbytes % ALIGN]
    if len(_heads) < MAX_HEADS:
        _heads[dtype, shape] = head
    return head


def _array(content: Bytes, nbytes: int) -> np.ndarray[Any, Any]:
    """The array in a piece, in memory of its own."""
    start = content[0] * ALIGN if len(content) else 0
    head = bytes(content[:start])
    known = _shapes.get(head)
    if known is None:
        known = _read_head(head)
        if len(_shapes) < MAX_HEADS:
            _shapes[head] = known
    dtype, shape, size = known
    if nbytes != size or len(content) < start + nbytes:
        raise ValueError(f"malformed array: {nbytes} bytes for {dtype} of shape {shape}")
    return np.ndarray(shape, dtype, bytearray(content[start : start + nbytes]))


def _read_head(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """What a head says: dtype, shape, bytes of the elements."""
    try:
        _, length, dimensions = struct.unpack_from("<BBB", head)
        shape = struct.unpack_from(f"<{dimensions}I", head, 3)
        name = head[3 + 4 * dimensions : 3 + 4 * dimensions + length].decode("ascii")
        dtype = np.dtype(name)
    except (struct.error, UnicodeDecodeError, TypeError, SyntaxError) as error:
        raise ValueError(f"malformed array: {error}") from None
    if dtype.kind not in PLAIN_DTYPES:
        raise ValueError(f"malformed array: of dtype {name!r}")
    return dtype, shape, dtype.itemsize * math.prod(shape)


def _flatten(parcel: Parcel) -> bytes:
    parts: list[Bytes] = [parcel.header, *parcel.buffers]
    head = struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts))
    padded: list[Bytes] = []
    for part in (head, *parts):
        padded.append(part)
        padded.append(_PADDING[-len(part) % ALIGN])
    return b"".join(padded)


def _parcel(content: Bytes) -> Parcel:
    """The parcel in a piece, in memory of its own: the block can go, and arrays are writable."""
    own = memoryview(bytearray(content))
    try:
        (count,) = _COUNT.unpack_from(own)
        sizes = struct.unpack_from(f"<{min(count, len(own))}I", own, 4)
    except struct.error as error:
        raise ValueError(f"malformed item: {error}") from None
    at = 4 + 4 * count
    at += -at % ALIGN
    parts: list[memoryview] = []
    for size in sizes:
        parts.append(own[at : at + size])
        at += size + -size % ALIGN
    if not parts or at != len(own):
        raise ValueError(f"malformed item: {count} parts of {at} bytes in {len(own)}")
    return Parcel(bytes(parts[0]), tuple(parts[1:]))

"""One item, closed: how it travels and waits without anybody looking inside.

A small item (all of it within `SMALL_BYTES`) is a piece of bytes, padded to 16. It is the bytes of
a `bytes` object itself; or the head of a plain numpy array (dtype and shape) and its elements; or
a parcel: the number of its parts, their sizes, then header and buffers, each padded. The first
two cost no codec. A large item is a `Parcel`, whose buffers the transport moves by reference
where it can.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf.comm.codec import Parcel

SMALL_BYTES = 4096
ALIGN = 16

RAW, SMALL, LARGE, ARRAY, CLAIM = 0, 1, 2, 3, 4
"""Kinds of items: bytes, a parcel in a piece, a parcel, a plain array; or a claim, see `claim`."""

PLAIN_DTYPES = "biufc"
MAX_HEADS = 1024
MAX_DIMENSIONS = 8

_COUNT = struct.Struct("<I")
_PADDING = tuple(bytes(n) for n in range(ALIGN))

Bytes = bytes | bytearray | memoryview

Cargo = tuple[int, int, "Bytes | Parcel"]
"""A closed item: its kind, its size without padding, its piece or parcel."""


def pack(value: object, *, allow_pickle: bool = True) -> Cargo:
    """Close an object. A small one is copied; a large one is still a view on its memory.

    Raises:
        CodecError: It cannot be encoded.
    """
    if type(value) is bytes and len(value) <= SMALL_BYTES:
        return RAW, len(value), value + _PADDING[-len(value) % ALIGN]
    if (
        type(value) is np.ndarray
        and value.nbytes <= SMALL_BYTES
        and value.dtype.kind in PLAIN_DTYPES
        and value.ndim <= MAX_DIMENSIONS
    ):
        return ARRAY, value.nbytes, _array_piece(value)
    parcel = Parcel.pack(value, allow_pickle=allow_pickle)
    if parcel.nbytes > SMALL_BYTES:
        return LARGE, parcel.nbytes, parcel
    return SMALL, parcel.nbytes, _flatten(parcel)


def unpack(cargo: Cargo, *, allow_pickle: bool = True) -> object:
    """Open an item. A small one gets memory of its own; a large one keeps what it arrived in.

    Raises:
        CodecError: It cannot be decoded here.
        ValueError: Its piece is malformed.
    """
    kind, nbytes, content = cargo
    if isinstance(content, Parcel):
        return content.open(allow_pickle=allow_pickle)
    if kind == RAW:
        return bytes(content[:nbytes])
    if kind == ARRAY:
        return _array(content, nbytes)
    return _parcel(content).open(allow_pickle=allow_pickle)


def detach(cargo: Cargo, empty: Callable[[int, type], Any]) -> Cargo:
    """A large item in memory of its own, made by `empty(nbytes, dtype)`, as `Endpoint.empty`.

    It may wait then, while the original changes; where the transport has shared memory it is sent
    from there without a further copy.
    """
    kind, nbytes, parcel = cargo
    assert isinstance(parcel, Parcel)
    copies: list[memoryview] = []
    for buffer in parcel.buffers:
        copy = empty(buffer.nbytes, np.uint8)
        copy[:] = np.frombuffer(buffer, np.uint8)
        copies.append(memoryview(copy))
    return kind, nbytes, Parcel(parcel.header, tuple(copies))


_heads: dict[tuple[str, tuple[int, ...]], bytes] = {}
_shapes: dict[bytes, tuple[np.dtype[Any], tuple[int, ...]]] = {}


def _array_piece(array: np.ndarray[Any, Any]) -> bytes:
    """Head and elements. The head's first byte is its own length in units of 16 bytes."""
    key = array.dtype.str, array.shape
    head = _heads.get(key)
    if head is None:
        name = key[0].encode()
        parts = struct.pack(f"<BBB{len(key[1])}I", 0, len(name), len(key[1]), *key[1]) + name
        head = bytes([-(-len(parts) // ALIGN)]) + parts[1:] + _PADDING[-len(parts) % ALIGN]
        if len(_heads) < MAX_HEADS:
            _heads[key] = head
    return b"".join((head, array.tobytes(), _PADDING[-array.nbytes % ALIGN]))


def _array(content: Bytes, nbytes: int) -> np.ndarray[Any, Any]:
    """The array in a piece, in memory of its own."""
    start = content[0] * ALIGN if len(content) else 0
    head = bytes(content[:start])
    known = _shapes.get(head)
    if known is None:
        known = _read_head(head)
        if len(_shapes) < MAX_HEADS:
            _shapes[head] = known
    dtype, shape = known
    own = np.frombuffer(bytearray(content[start : start + nbytes]), dtype)
    return own.reshape(shape)


def _read_head(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    try:
        _, length, dimensions = struct.unpack_from("<BBB", head)
        shape = struct.unpack_from(f"<{dimensions}I", head, 3)
        name = head[3 + 4 * dimensions : 3 + 4 * dimensions + length].decode("ascii")
        dtype = np.dtype(name)
    except (struct.error, UnicodeDecodeError, TypeError, SyntaxError) as error:
        raise ValueError(f"malformed array: {error}") from None
    if dtype.kind not in PLAIN_DTYPES:
        raise ValueError(f"malformed array: of dtype {name!r}")
    return dtype, shape


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

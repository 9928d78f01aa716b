"""Many items in one message: small ones share a block of bytes, large ones travel as parcels.

A small item (all of it within `SMALL_BYTES`) is copied into the block and costs no codec on the
way. The server never looks inside: it knows where in which block an item lies, and joins the
pieces of many producers' blocks into the block of one delivery, whole runs at a time. A large
item stays a closed `Parcel`, whose buffers the transport moves by reference where it can.

An item's piece of a block is padded to 16 bytes. It is either the bytes of a `bytes` object
itself, or a parcel: the number of its parts, their sizes, then header and buffers, each padded.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlinf.channel.errors import InvalidWeight
from rlinf.channel.messages import Item
from rlinf.comm.codec import Parcel

SMALL_BYTES = 4096
ALIGN = 16

_ROW = struct.Struct("<dQIB")
_COUNT = struct.Struct("<I")
_PADDING = tuple(bytes(n) for n in range(ALIGN))

RAW, SMALL, LARGE = 0, 1, 2

Bytes = bytes | bytearray | memoryview

Cargo = tuple[int, int, "Bytes | Parcel"]
"""One closed item at a client: its kind, its size without padding, its piece or parcel."""

Loaded = tuple[Cargo, float, str | None]
"""A closed item with its weight and key."""


class Crate(NamedTuple):
    """Items in one message; the fields of the wire."""

    rows: Bytes
    """Of each item, in order: weight, size, size of its piece of the block, kind."""
    block: Bytes
    """The pieces of the small items, in order."""
    parcels: list[Parcel]
    """The large items, in order."""
    keys: list[str | None] | None
    """The key of each item; None if none has one."""


def pack(value: object, *, allow_pickle: bool = True) -> Cargo:
    """Close an object. A small one is copied; a large one is still a view on its memory.

    Raises:
        CodecError: It cannot be encoded.
    """
    if type(value) is bytes and len(value) <= SMALL_BYTES:
        return RAW, len(value), value + _PADDING[-len(value) % ALIGN]
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


class Loading:
    """A message while it is being loaded, at a producer."""

    __slots__ = ("count", "keys", "nbytes", "parcels", "pieces", "rows")

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.pieces: list[Bytes] = []
        self.parcels: list[Parcel] = []
        self.keys: list[str | None] | None = None
        self.count = 0
        self.nbytes = 0
        """Size of the items, without padding."""

    def add(self, cargo: Cargo, weight: float, key: str | None) -> None:
        """Load one item."""
        kind, nbytes, content = cargo
        if kind == LARGE:
            assert isinstance(content, Parcel)
            self.rows.append(_ROW.pack(weight, nbytes, 0, kind))
            self.parcels.append(content)
        else:
            assert not isinstance(content, Parcel)
            self.rows.append(_ROW.pack(weight, nbytes, len(content), kind))
            self.pieces.append(content)
        if key is not None and self.keys is None:
            self.keys = [None] * self.count
        if self.keys is not None:
            self.keys.append(key)
        self.count += 1
        self.nbytes += nbytes

    def extend(self, other: "Loading") -> None:
        """Load everything of another message behind what is here."""
        if other.keys is not None and self.keys is None:
            self.keys = [None] * self.count
        if self.keys is not None:
            self.keys += other.keys or [None] * other.count
        self.rows += other.rows
        self.pieces += other.pieces
        self.parcels += other.parcels
        self.count += other.count
        self.nbytes += other.nbytes

    def crate(self) -> Crate:
        """The message."""
        pieces = self.pieces
        block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Crate(b"".join(self.rows), block, self.parcels, self.keys)


def load(items: Sequence[Loaded]) -> Crate:
    """Several items in one message."""
    loading = Loading()
    for cargo, weight, key in items:
        loading.add(cargo, weight, key)
    return loading.crate()


def cargos(message: Crate) -> list[Cargo]:
    """The items of a message, at a consumer; pieces are views on its block.

    Raises:
        ValueError: The message is malformed.
    """
    view, large, at = memoryview(message.block), iter(message.parcels), 0
    found: list[Cargo] = []
    for _, nbytes, size, kind in _rows(message):
        if kind == LARGE:
            found.append((kind, nbytes, next(large)))
        else:
            found.append((kind, nbytes, view[at : at + size]))
            at += size
    return found


class _Shelf:
    """A message at the server, for as long as one of its items is there."""

    __slots__ = ("block", "rows")

    def __init__(self, message: Crate) -> None:
        self.rows = memoryview(message.rows)
        self.block = memoryview(message.block)


Place = tuple[_Shelf, int, int, int, Parcel | None]
"""Where an item lies: shelf, index of its row, its piece's first and last byte; or its parcel."""


def shelve(message: Crate, channel: str) -> list[Item]:
    """The items of a message, at the server; their payloads are places.

    Raises:
        ValueError: The message is malformed (InvalidWeight: by a weight).
    """
    shelf, large, at = _Shelf(message), iter(message.parcels), 0
    keys = message.keys
    items: list[Item] = []
    for index, (weight, nbytes, size, kind) in enumerate(_rows(message)):
        if not 0 < weight < float("inf"):
            raise InvalidWeight(channel, weight)
        parcel = next(large) if kind == LARGE else None
        place: Place = (shelf, index, at, at + size, parcel)
        items.append(Item(place, weight, None if keys is None else keys[index], nbytes))
        at += size
    return items


def collect(items: Sequence[Item]) -> Crate:
    """One message of items from any shelves; a run that lies together is one piece."""
    rows: list[Bytes] = []
    pieces: list[Bytes] = []
    parcels: list[Parcel] = []
    keyed = False
    shelf: _Shelf | None = None
    start = until = first = last = 0
    width = _ROW.size
    for item in items:
        place: Place = item.payload  # type: ignore[assignment]
        if place[0] is not shelf or place[1] != until:
            if shelf is not None:
                rows.append(shelf.rows[start * width : until * width])
                pieces.append(shelf.block[first:last])
            shelf, start, first = place[0], place[1], place[2]
        until, last = place[1] + 1, place[3]
        if place[4] is not None:
            parcels.append(place[4])
        keyed = keyed or item.key is not None
    if shelf is not None:
        rows.append(shelf.rows[start * width : until * width])
        pieces.append(shelf.block[first:last])
    keys = [item.key for item in items] if keyed else None
    block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Crate(b"".join(rows), block, parcels, keys)


def _rows(message: Crate) -> list[tuple[float, int, int, int]]:
    """The rows of a message whose parts agree with each other."""
    try:
        rows = list(_ROW.iter_unpack(message.rows))
    except struct.error as error:
        raise ValueError(f"malformed items: {error}") from None
    sizes = sum([row[2] for row in rows])
    large = sum([row[3] == LARGE for row in rows])
    keys = len(rows) if message.keys is None else len(message.keys)
    if (sizes, large, keys) != (len(message.block), len(message.parcels), len(rows)):
        raise ValueError(
            f"malformed items: {len(rows)} rows of {sizes} bytes and {large} parcels, but "
            f"{len(message.block)} bytes, {len(message.parcels)} parcels, {keys} keys"
        )
    return rows


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

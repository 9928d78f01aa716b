"""Many items in one message: small ones share a block of bytes, large ones travel beside it.

The server never looks inside: it knows where in which block an item lies, and joins the pieces of
many producers' blocks into the block of one delivery, whole runs at a time.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from rlinf.channel.cargo import CLAIM, LARGE, Bytes, Cargo
from rlinf.channel.claim import Claim, read_claim
from rlinf.channel.errors import InvalidWeight
from rlinf.channel.messages import Item
from rlinf.comm.codec import Parcel

_ROW = struct.Struct("<dQIB")

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


def claims(items: Sequence[Item]) -> list[Claim]:
    """The claims among items, at the server."""
    found: list[Claim] = []
    for item in items:
        place: Place = item.payload  # type: ignore[assignment]
        shelf, index, first, last, _ = place
        if shelf.rows[(index + 1) * _ROW.size - 1] == CLAIM:
            found.append(read_claim(shelf.block[first:last]))
    return found


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

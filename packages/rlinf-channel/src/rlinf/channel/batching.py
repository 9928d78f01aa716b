"""Many items in one message: small ones share a block of bytes, large ones travel beside it.

The server never looks inside: it knows where in which block an item lies, and joins the pieces of
many producers' blocks into the block of one delivery, whole runs at a time.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from rlinf.channel.cargo import CLAIM, LARGE, Bytes, Cargo
from rlinf.channel.claim import Claim, read_claim
from rlinf.channel.errors import InvalidWeight
from rlinf.channel.messages import Item
from rlinf.comm.codec import Parcel

_WIDTH = struct.calcsize("<dQIB")

Loaded = tuple[Cargo, float, str | None]
"""A closed item with its weight and key."""


class Crate(NamedTuple):
    """Items in one message; the fields of the wire."""

    columns: Bytes
    """The weights of the items, then their sizes, the sizes of their pieces of the block, kinds."""
    block: Bytes
    """The pieces of the small items, in order."""
    parcels: list[Parcel]
    """The large items, in order."""
    keys: list[str | None] | None
    """The key of each item; None if none has one."""


class Loading:
    """A message while it is being loaded, at a producer."""

    __slots__ = (
        "count",
        "keys",
        "kinds",
        "lengths",
        "nbytes",
        "parcels",
        "pieces",
        "sizes",
        "weights",
    )

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.sizes: list[int] = []
        self.lengths: list[int] = []
        self.kinds: list[int] = []
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
            self.lengths.append(0)
            self.parcels.append(content)
        else:
            assert not isinstance(content, Parcel)
            self.lengths.append(len(content))
            self.pieces.append(content)
        self.weights.append(weight)
        self.sizes.append(nbytes)
        self.kinds.append(kind)
        if key is not None and self.keys is None:
            self.keys = [None] * self.count
        if self.keys is not None:
            self.keys.append(key)
        self.count += 1
        self.nbytes += nbytes

    def add_all(
        self, cargos: Sequence[Cargo], weights: Iterable[float], keys: Sequence[str | None] | None
    ) -> None:
        """Load several items; the same as `add` for each, in a third of the time."""
        kinds, sizes, contents = zip(*cargos, strict=True)
        if LARGE in kinds or keys is not None or self.keys is not None:
            for cargo, weight, key in zip(
                cargos, weights, keys or [None] * len(cargos), strict=True
            ):
                self.add(cargo, weight, key)
            return
        self.weights += weights
        self.sizes += sizes
        self.lengths += map(len, contents)
        self.kinds += kinds
        self.pieces += contents
        self.count += len(cargos)
        self.nbytes += sum(sizes)

    def extend(self, other: "Loading") -> None:
        """Load everything of another message behind what is here."""
        if other.keys is not None and self.keys is None:
            self.keys = [None] * self.count
        if self.keys is not None:
            self.keys += other.keys or [None] * other.count
        self.weights += other.weights
        self.sizes += other.sizes
        self.lengths += other.lengths
        self.kinds += other.kinds
        self.pieces += other.pieces
        self.parcels += other.parcels
        self.count += other.count
        self.nbytes += other.nbytes

    def crate(self) -> Crate:
        """The message."""
        pieces = self.pieces
        block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        columns = struct.pack(
            _columns_of(self.count), *self.weights, *self.sizes, *self.lengths, *self.kinds
        )
        return Crate(columns, block, self.parcels, self.keys)


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
    view = memoryview(message.block)
    _, sizes, lengths, kinds = _columns(message)
    starts = list(accumulate(lengths, initial=0))
    contents: Iterable[Bytes | Parcel] = map(view.__getitem__, map(slice, starts, starts[1:]))
    if message.parcels:
        large, small = iter(message.parcels), list(contents)
        contents = [next(large) if k == LARGE else one for k, one in zip(kinds, small, strict=True)]
    return list(zip(kinds, sizes, contents, strict=True))


class _Shelf:
    """A message at the server, for as long as one of its items is there."""

    __slots__ = ("block", "columns", "count")

    def __init__(self, message: Crate) -> None:
        self.columns = memoryview(message.columns)
        self.count = len(message.columns) // _WIDTH
        self.block = memoryview(message.block)

    def run(self, first: int, end: int) -> tuple[memoryview, ...]:
        """Weights, sizes, sizes of pieces and kinds of the items from `first` to before `end`."""
        columns, count = self.columns, self.count
        return (
            columns[8 * first : 8 * end],
            columns[8 * (count + first) : 8 * (count + end)],
            columns[16 * count + 4 * first : 16 * count + 4 * end],
            columns[20 * count + first : 20 * count + end],
        )

    def kind(self, index: int) -> int:
        """What an item is."""
        return self.columns[20 * self.count + index]


Place = tuple[_Shelf, int, int, int, Parcel | None]
"""Where an item lies: shelf, index of its row, its piece's first and last byte; or its parcel."""


def shelve(message: Crate, channel: str) -> list[Item]:
    """The items of a message, at the server; their payloads are places.

    Raises:
        ValueError: The message is malformed (InvalidWeight: by a weight).
    """
    weights, sizes, lengths, kinds = _columns(message)
    if weights and not (min(weights) > 0 and math.isfinite(sum(weights))):
        for weight in weights:
            if not 0 < weight < math.inf:
                raise InvalidWeight(channel, weight)
    parcels: Iterable[Parcel | None] = repeat(None)
    if message.parcels:
        large = iter(message.parcels)
        parcels = [next(large) if kind == LARGE else None for kind in kinds]
    starts = list(accumulate(lengths, initial=0))
    shelf = repeat(_Shelf(message))
    places = zip(shelf, range(len(kinds)), starts, starts[1:], parcels)  # noqa: B905 - some endless
    return list(map(Item, places, weights, message.keys or repeat(None), sizes))


def claims(items: Sequence[Item]) -> list[Claim]:
    """The claims among items, at the server."""
    found: list[Claim] = []
    for item in items:
        place: Place = item.payload  # type: ignore[assignment]
        shelf, index, first, last, _ = place
        if shelf.kind(index) == CLAIM:
            found.append(read_claim(shelf.block[first:last]))
    return found


def collect(items: Sequence[Item]) -> Crate:
    """One message of items from any shelves; a run that lies together is one piece."""
    runs: list[tuple[memoryview, ...]] = []
    pieces: list[Bytes] = []
    parcels: list[Parcel] = []
    keyed = False
    shelf: _Shelf | None = None
    start = until = first = last = 0
    for item in items:
        place: Place = item.payload  # type: ignore[assignment]
        if place[0] is not shelf or place[1] != until:
            if shelf is not None:
                runs.append(shelf.run(start, until))
                pieces.append(shelf.block[first:last])
            shelf, start, first = place[0], place[1], place[2]
        until, last = place[1] + 1, place[3]
        if place[4] is not None:
            parcels.append(place[4])
        keyed = keyed or item.key is not None
    if shelf is not None:
        runs.append(shelf.run(start, until))
        pieces.append(shelf.block[first:last])
    keys = [item.key for item in items] if keyed else None
    block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    columns = b"".join(chain.from_iterable(zip(*runs, strict=True)))
    return Crate(columns, block, parcels, keys)


def _columns_of(count: int) -> str:
    return f"<{count}d{count}Q{count}I{count}B"


Columns = tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _columns(message: Crate) -> Columns:
    """Weights, sizes, sizes of the pieces and kinds of a message whose parts agree."""
    count = len(message.columns) // _WIDTH
    try:
        flat = struct.unpack(_columns_of(count), message.columns)
    except struct.error as error:
        raise ValueError(f"malformed items: {error}") from None
    columns: Columns = (
        flat[:count],
        flat[count : 2 * count],
        flat[2 * count : 3 * count],
        flat[3 * count :],
    )
    pieces, large = sum(columns[2]), columns[3].count(LARGE)
    keys = count if message.keys is None else len(message.keys)
    if (pieces, large, keys) != (len(message.block), len(message.parcels), count):
        raise ValueError(
            f"malformed items: {count} items of {pieces} bytes and {large} parcels, but "
            f"{len(message.block)} bytes, {len(message.parcels)} parcels, {keys} keys"
        )
    return columns

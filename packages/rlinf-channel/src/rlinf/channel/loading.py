"""A message while it is loaded, at a producer: items one by one, or many alike at once.

What is the same for many items is said once from the start, so that such items cost next to nothing
here beside the one copy of their bytes.
"""

from array import array
from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple

from rlinf.channel.batching import KINDS, LENGTHS, SIZES, WEIGHTS, Crate, Wire
from rlinf.channel.cargo import LARGE, Bytes, Cargo, Empty, pack_alike
from rlinf.channel.run import Column
from rlinf.comm.codec import Parcel

Keys = Sequence[str | None]


class _Load(NamedTuple):
    """Items that were loaded together; see `Crate`."""

    items: int
    weights: Column
    sizes: Column
    lengths: Column
    kinds: Column
    pieces: list[Bytes]
    parcels: list[Parcel]
    keys: Keys | None


class Loading:
    """A message while it is being loaded.

    Attributes:
        parcels: The large ones among the items added last.
        count: Items.
        nbytes: Their size, without heads and padding.
    """

    __slots__ = (
        "_keys",
        "_kinds",
        "_lengths",
        "_loads",
        "_pieces",
        "_sizes",
        "_weights",
        "count",
        "nbytes",
        "parcels",
    )

    def __init__(self) -> None:
        self._loads: list[_Load] = []
        self.count = 0
        self.nbytes = 0
        self._open()

    def add(self, cargo: Cargo, weight: float, key: str | None) -> None:
        """Load one item."""
        kind, nbytes, content = cargo
        if kind == LARGE:
            assert isinstance(content, Parcel)
            self._lengths.append(0)
            self.parcels.append(content)
        else:
            assert not isinstance(content, Parcel)
            self._lengths.append(len(content))
            self._pieces.append(content)
        self._weights.append(weight)
        self._sizes.append(nbytes)
        self._kinds.append(kind)
        self._keys.append(key)
        self.count += 1
        self.nbytes += nbytes

    def add_alike(
        self, items: Sequence[object], weights: Column, keys: Keys | None, empty: Empty
    ) -> bool:
        """Load several small items of one kind; False where they are not alike.

        `weights`: One number where it is the same for all. `empty`: see `pack_alike`.
        """
        alike = pack_alike(items, empty)
        if alike is None:
            return False
        kind, sizes, lengths, pieces = alike
        count = len(items)
        self._loads = self._all()
        self._open()
        self._loads.append(_Load(count, weights, sizes, lengths, kind, pieces, [], keys))
        self.count += count
        self.nbytes += sizes * count if isinstance(sizes, int) else sum(sizes)
        return True

    def extend(self, other: "Loading") -> None:
        """Load everything of another message behind what is here."""
        self._loads = self._all() + other._all()
        self._open()
        self.count += other.count
        self.nbytes += other.nbytes

    def crate(self) -> Crate:
        """The message."""
        loads = self._all()
        pieces = list(chain.from_iterable([load.pieces for load in loads]))
        block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        counts = [load.items for load in loads]
        parcels = list(chain.from_iterable([load.parcels for load in loads]))
        keys: list[str | None] | None = None
        if any(load.keys is not None for load in loads):
            keys = [key for load in loads for key in load.keys or repeat(None, load.items)]
        return Crate(
            self.count,
            _column([load.weights for load in loads], counts, WEIGHTS),
            _column([load.sizes for load in loads], counts, SIZES),
            _column([load.lengths for load in loads], counts, LENGTHS),
            _column([load.kinds for load in loads], counts, KINDS),
            memoryview(block),  # as a view it is not copied where it arrives
            parcels,
            keys,
        )

    def _open(self) -> None:
        self._weights: list[float] = []
        self._sizes: list[int] = []
        self._lengths: list[int] = []
        self._kinds: list[int] = []
        self._pieces: list[Bytes] = []
        self._keys: list[str | None] = []
        self.parcels: list[Parcel] = []

    def _all(self) -> list[_Load]:
        """What was added one by one as well."""
        count = len(self._kinds)
        if not count:
            return self._loads
        columns = self._weights, self._sizes, self._lengths, self._kinds
        keys = None if self._keys.count(None) == count else self._keys
        return [*self._loads, _Load(count, *columns, self._pieces, self.parcels, keys)]


def _column(columns: Sequence[Column], counts: Sequence[int], form: str) -> Wire:
    """One number, if that is what it is for all items; else all of them, packed."""
    value = columns[0] if isinstance(columns[0], int | float) else columns[0][0]
    if all(_is(column, value) for column in columns):
        return float(value) if form == WEIGHTS else value
    rows = zip(columns, counts, strict=True)
    spread = [repeat(c, n) if isinstance(c, int | float) else c for c, n in rows]
    return array(form, chain.from_iterable(spread)).tobytes()


def _is(column: Column, value: float) -> bool:
    if isinstance(column, int | float):
        return column == value
    return column.count(value) == len(column)

"""Many items in one message: small ones share a block of bytes, large ones travel beside it.

What is the same for all of them (mostly everything) is said once. The server never looks inside: it
keeps a message as it came, and its items as runs of it; of what it gives out only small pieces are
copied together.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, groupby, repeat
from typing import NamedTuple

from rlinf.channel.cargo import (
    CLAIM,
    LARGE,
    RAW,
    Bytes,
    Cargo,
    open_alike,
    open_raw,
    unpack_all,
)
from rlinf.channel.claim import Claim, read_claim
from rlinf.channel.errors import InvalidWeight
from rlinf.channel.run import Column, Run
from rlinf.comm.codec import Parcel

JOIN_BYTES = 1 << 15
"""Neighbours are copied together into blocks up to this size: that costs less than a buffer."""

Wire = float | Bytes
"""A column as it travels: one number, or all of them packed."""
WEIGHTS, SIZES, LENGTHS, KINDS = "d", "Q", "I", "B"
"""Formats of the columns."""


class Crate(NamedTuple):
    """Items in one message; the fields of the wire."""

    items: int
    """How many."""
    weights: Wire
    sizes: Wire
    """Without heads and padding: what bounds are reckoned in."""
    lengths: Wire
    """Of the pieces of the block; 0 for a large item."""
    kinds: Wire
    block: Bytes
    """The pieces of the small items, in order."""
    parcels: list[Parcel]
    """The large items, in order."""
    keys: list[str | None] | None
    """The key of each item; None if none has one, or nobody needs to know."""


class Shelf:
    """A message at the server or a consumer, for as long as one of its items is there."""

    __slots__ = ("_starts", "block", "count", "kinds", "lengths", "parcels", "sizes", "weights")

    def __init__(self, crate: Crate) -> None:
        count = self.count = crate.items
        self.weights = _column(crate.weights, count, WEIGHTS)
        self.sizes = _column(crate.sizes, count, SIZES)
        self.lengths = _column(crate.lengths, count, LENGTHS)
        self.kinds = _column(crate.kinds, count, KINDS)
        self.block = memoryview(crate.block)
        self.parcels = crate.parcels
        self._starts: list[int] | None = None

    def start(self, index: int) -> int:
        """Where in the block the piece of an item begins."""
        lengths = self.lengths
        if isinstance(lengths, int | float):
            return int(lengths) * index
        if self._starts is None:
            self._starts = list(accumulate(lengths, initial=0))  # type: ignore[arg-type]
        return int(self._starts[index])

    def pieces(self, first: int, end: int) -> memoryview:
        """The pieces of these items."""
        return self.block[self.start(first) : self.start(end)]

    def large(self, first: int, end: int) -> list[Parcel]:
        """The parcels of these items."""
        if not self.parcels:
            return []
        kinds = self.kinds
        if isinstance(kinds, int | float):
            return self.parcels[first:end]
        before = bytes(kinds[:first]).count(LARGE)  # type: ignore[arg-type]
        return self.parcels[before : before + bytes(kinds[first:end]).count(LARGE)]  # type: ignore

    def crate(self, first: int, end: int, keys: list[str | None] | None) -> Crate:
        """A message of these items."""
        columns = [
            _cut(c, first, end) for c in (self.weights, self.sizes, self.lengths, self.kinds)
        ]
        pieces, large = self.pieces(first, end), self.large(first, end)
        return Crate(end - first, *columns, pieces, large, keys)  # type: ignore[arg-type, call-arg]


def shelve(crate: Crate, channel: str) -> list[Run]:
    """The items of a message: a run for each change of key.

    Raises:
        ValueError: The message is malformed (InvalidWeight: by a weight).
    """
    try:
        shelf = Shelf(crate)
        pieces = shelf.start(shelf.count)
        large = shelf.count if shelf.kinds == LARGE else 0
        if not isinstance(shelf.kinds, int | float):
            large = bytes(shelf.kinds).count(LARGE)  # type: ignore[arg-type]
    except (TypeError, IndexError) as error:
        raise ValueError(f"malformed items: {error}") from None
    keys = crate.keys
    there = len(crate.block), len(crate.parcels), crate.items if keys is None else len(keys)
    if (pieces, large, shelf.count) != there or shelf.count < 1:
        raise ValueError(
            f"malformed items: {shelf.count} items of {pieces} bytes and {large} parcels, but "
            f"{there[0]} bytes, {there[1]} parcels, {there[2]} keys"
        )
    _check_weights(shelf.weights, channel)
    columns = shelf, shelf.weights, shelf.sizes
    if keys is None:
        return [Run(*columns, None, shelf.count)]
    runs: list[Run] = []
    first = 0
    for key, same in groupby(keys):
        count = sum(1 for _ in same)
        runs.append(Run(*columns, key, count, first))
        first += count
    return runs


def collect(runs: Iterable[Run], *, keyed: bool = True) -> list[Crate]:
    """Messages of runs from any shelves, in order. What lies together stays together; small
    neighbours are joined. `keyed`: whether the keys are of interest.
    """
    places: list[tuple[Shelf, int, int, list[str | None]]] = []
    for run in runs:
        shelf: Shelf = run.payload  # type: ignore[assignment]
        keys = [run.key] * run.count if keyed else []
        if places and places[-1][0] is shelf and places[-1][2] == run.first:
            _, first, _, before = places.pop()
            places.append((shelf, first, run.end, before + keys))
        else:
            places.append((shelf, run.first, run.end, keys))
    crates: list[Crate] = []
    group: list[Crate] = []
    nbytes = 0
    for shelf, first, end, keys in places:
        named = keys if any(key is not None for key in keys) else None
        crate = shelf.crate(first, end, named)
        if group and nbytes + len(crate.block) > JOIN_BYTES:
            crates.append(_join(group))
            group, nbytes = [], 0
        group.append(crate)
        nbytes += len(crate.block)
    return [*crates, _join(group)] if group else crates


def wires(runs: Iterable[Run]) -> tuple[tuple[object, ...], ...]:
    """Items as a reply carries them, without keys."""
    return tuple(tuple(crate) for crate in collect(runs, keyed=False))


def cargos(run: Run) -> list[Cargo]:
    """The items of a run at a consumer, closed; pieces are views on their block."""
    shelf: Shelf = run.payload  # type: ignore[assignment]
    first, end, count = run.first, run.end, run.count
    kinds = _spread(shelf.kinds, first, end)
    lengths = _spread(shelf.lengths, first, end)
    starts = list(accumulate(lengths, initial=0))
    view = shelf.pieces(first, end)
    contents: Iterable[Bytes | Parcel] = map(view.__getitem__, map(slice, starts, starts[1:]))
    if shelf.parcels:
        large, small = iter(shelf.large(first, end)), list(contents)
        contents = [next(large) if k == LARGE else one for k, one in zip(kinds, small, strict=True)]
    sizes = _spread(shelf.sizes, first, end)
    assert len(kinds) == len(sizes) == count
    return list(zip(kinds, sizes, contents, strict=True))


def open_run(run: Run, allow_pickle: bool = True) -> list[object]:
    """The items of a run at a consumer. Arrays that are alike share memory of their own.

    Raises:
        CodecError: One cannot be decoded here.
        ValueError: One is malformed.
    """
    shelf: Shelf = run.payload  # type: ignore[assignment]
    kinds, sizes, lengths = shelf.kinds, shelf.sizes, shelf.lengths
    if isinstance(kinds, int) and run.count > 1:
        block = shelf.pieces(run.first, run.end)
        if isinstance(sizes, int) and isinstance(lengths, int):
            items = open_alike(kinds, sizes, run.count, block)
            if items is not None:
                return items
        elif kinds == RAW:
            return open_raw(_spread(lengths, run.first, run.end), block)
    return unpack_all(cargos(run), allow_pickle)


def claims(runs: Sequence[Run]) -> list[Claim]:
    """The claims among items, at the server."""
    pieces = [cargo for run in runs for cargo in cargos(run) if cargo[0] == CLAIM]
    return [read_claim(piece) for _, _, piece in pieces]  # type: ignore[arg-type]


def holds_claims(run: Run) -> bool:
    """Whether there is a claim among the items."""
    shelf: Shelf = run.payload  # type: ignore[assignment]
    kinds = shelf.kinds
    return CLAIM in kinds if isinstance(kinds, Sequence | memoryview) else kinds == CLAIM


def _check_weights(weights: Column, channel: str) -> None:
    if isinstance(weights, int | float):
        if not 0 < weights < math.inf:
            raise InvalidWeight(channel, weights)
    elif not (min(weights) > 0 and math.isfinite(sum(weights))):
        for weight in weights:
            if not 0 < weight < math.inf:
                raise InvalidWeight(channel, weight)


def _packed(values: Sequence[float], form: str) -> Wire:
    first = float(values[0]) if form == WEIGHTS else values[0]
    return first if values.count(first) == len(values) else array(form, values).tobytes()


def _column(wire: Wire, count: int, form: str) -> Column:
    if isinstance(wire, int | float):
        if form != WEIGHTS and not (isinstance(wire, int) and wire >= 0):
            raise ValueError(f"malformed items: a column of {wire}")
        return wire
    column: Sequence[float] = memoryview(wire).cast("B").cast(form)  # type: ignore[call-overload]
    if len(column) != count:
        raise ValueError(f"malformed items: {len(column)} figures for {count} items")
    return column


def _cut(column: Column, first: int, end: int) -> Wire:
    return column if isinstance(column, int | float) else column[first:end].tobytes()  # type: ignore


def _spread(column: Column, first: int, end: int) -> list[int]:
    if isinstance(column, int | float):
        return [int(column)] * (end - first)
    return list(column[first:end])  # type: ignore[arg-type]


def _joined(pieces: Sequence[Bytes]) -> Bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _join(crates: Sequence[Crate]) -> Crate:
    """One message of several."""
    if len(crates) == 1:
        return crates[0]
    count = sum([crate.items for crate in crates])
    forms = WEIGHTS, SIZES, LENGTHS, KINDS
    columns = []
    by_column = zip(*(crate[1:5] for crate in crates), strict=True)
    for form, wires in zip(forms, by_column, strict=True):
        parts = zip(wires, crates, strict=True)
        figures = [_figures(wire, crate.items, form) for wire, crate in parts]
        columns.append(_packed(list(chain.from_iterable(figures)), form))
    keys = None
    if any(crate.keys for crate in crates):
        keys = list(chain.from_iterable(crate.keys or [None] * crate.items for crate in crates))
    parcels = list(chain.from_iterable(crate.parcels for crate in crates))
    block = memoryview(_joined([crate.block for crate in crates]))
    return Crate(count, *columns, block, parcels, keys)  # type: ignore[arg-type, call-arg]


def _figures(wire: Wire, count: int, form: str) -> Iterable[float]:
    column = _column(wire, count, form)
    return repeat(column, count) if isinstance(column, int | float) else column

"""Run: items that came together and are moved as one, whatever their number."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

Column = float | Sequence[float]
"""A figure of each item of a payload; one number where it is the same for all."""


class Run:
    """Consecutive items of one key in the queue. A lone item is a run of one.

    Args:
        payload: What they came in, with others perhaps. Opaque to the core.
        weights: Of the payload's items.
        sizes: Of the payload's items, in bytes.
        key: Of these items.
        count: How many these are.
        first: Which of the payload's items is the first of them.
    """

    __slots__ = (
        "count",
        "first",
        "key",
        "nbytes",
        "order",
        "payload",
        "returns",
        "sizes",
        "weight",
        "weights",
    )

    def __init__(
        self,
        payload: object,
        weights: Column,
        sizes: Column,
        key: str | None = None,
        count: int = 1,
        first: int = 0,
    ) -> None:
        self.payload = payload
        self.weights = weights
        self.sizes = sizes
        self.key = key
        self.count = count
        self.first = first
        self.weight = total(weights, first, first + count)
        """Of all."""
        self.nbytes = int(total(sizes, first, first + count))
        """Of all."""
        self.order = 0
        """Position of the first item in the channel, set on admission; kept when it comes back. At
        a consumer: its tag."""
        self.returns = 0
        """How often they went back to the queue after a consumer had them."""

    def __repr__(self) -> str:
        last = self.order + self.count - 1
        return f"Run(orders={self.order}..{last}, weight={self.weight:g}, key={self.key!r})"

    @property
    def end(self) -> int:
        """Behind the last of them in the payload."""
        return self.first + self.count

    def split(self, count: int) -> "Run":
        """Take the first so many items out, as a run of their own; the others stay in this one."""
        first = self.first
        part = Run(self.payload, self.weights, self.sizes, self.key, count, first)
        part.order, part.returns = self.order, self.returns
        self.first += count
        self.order += count
        self.count -= count
        self.nbytes -= part.nbytes
        self.weight = self.weight - part.weight if self.count else 0.0
        return part

    def copy(self) -> "Run":
        """The same items once more, for whoever is not told of what becomes of this one."""
        other = Run(self.payload, self.weights, self.sizes, self.key, self.count, self.first)
        other.order, other.returns = self.order, self.returns
        return other

    def weigh(self, count: int) -> float:
        """Weight of the first so many."""
        return total(self.weights, self.first, self.first + count)

    def within_weight(self, limit: float) -> int:
        """How many from the first on weigh at most `limit` together."""
        return self.count if self.weight <= limit else self._within(self.weights, limit)

    def within_bytes(self, limit: int) -> int:
        """How many from the first on are at most `limit` bytes together."""
        return self.count if self.nbytes <= limit else self._within(self.sizes, limit)

    def _within(self, column: Column, limit: float) -> int:
        if isinstance(column, int | float):
            return max(0, min(self.count, int(limit / column)))
        return bisect_right(list(accumulate(column[self.first : self.end])), limit)


def total(column: Column, first: int, end: int) -> float:
    """Of the items from `first` to before `end`."""
    if isinstance(column, int | float):
        return column * (end - first)
    return sum(column[first:end])

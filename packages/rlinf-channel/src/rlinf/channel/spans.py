"""Numbers of items (tags, orders, sequence numbers) in runs: first, last, first, last, ..."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

from rlinf.channel.run import Run

Ranges = tuple[int, ...]
"""First and last number of each run, ascending: also the form of the wire."""


def pairs(ranges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run."""
    return zip(ranges[::2], ranges[1::2], strict=True)


def length(ranges: Sequence[int]) -> int:
    """How many numbers they are."""
    return sum(ranges[1::2]) - sum(ranges[::2]) + len(ranges) // 2


def ranges(numbers: Iterable[int]) -> Ranges:
    """The runs in which ascending numbers follow each other."""
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-1] + 1:
            runs[-1] = number
        else:
            runs += (number, number)
    return tuple(runs)


def expand(ranges: Sequence[int]) -> list[int]:
    """Every number."""
    return [number for first, last in pairs(ranges) for number in range(first, last + 1)]


class Spans:
    """A set of numbers that come and go in runs."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Sequence[int] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.update(ranges)

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def add(self, first: int, last: int) -> None:
        """Add a run of numbers."""
        firsts, lasts = self._firsts, self._lasts
        if not lasts or first > lasts[-1] + 1:
            firsts.append(first)
            lasts.append(last)
            return
        if first == lasts[-1] + 1:
            lasts[-1] = last
            return
        low = bisect_left(lasts, first - 1)
        high = bisect_right(firsts, last + 1)
        if low < high:
            first, last = min(first, firsts[low]), max(last, lasts[high - 1])
        firsts[low:high] = [first]
        lasts[low:high] = [last]

    def remove(self, first: int, last: int) -> None:
        """Remove what is there of a run of numbers."""
        firsts, lasts = self._firsts, self._lasts
        low, high = bisect_left(lasts, first), bisect_right(firsts, last)
        if low >= high:
            return
        before, after = firsts[low], lasts[high - 1]
        firsts[low:high] = [before] * (before < first) + [last + 1] * (after > last)
        lasts[low:high] = [first - 1] * (before < first) + [after] * (after > last)

    def update(self, ranges: Sequence[int]) -> None:
        """Add numbers."""
        for first, last in pairs(ranges):
            self.add(first, last)

    def absorb(self, other: "Spans") -> None:
        """Take all numbers of another over."""
        for first, last in zip(other._firsts, other._lasts, strict=True):
            self.add(first, last)
        other.clear()

    def difference_update(self, ranges: Sequence[int]) -> None:
        """Remove numbers."""
        for first, last in pairs(ranges):
            self.remove(first, last)

    def common(self, ranges: Sequence[int]) -> int:
        """How many of these numbers are here."""
        count = 0
        for first, last in pairs(ranges):
            at = bisect_left(self._lasts, first)
            while at < len(self._firsts) and self._firsts[at] <= last:
                count += min(last, self._lasts[at]) - max(first, self._firsts[at]) + 1
                at += 1
        return count

    def keep_latest(self, runs: int) -> None:
        """Forget all but the last so many runs."""
        del self._firsts[:-runs], self._lasts[:-runs]

    def clear(self) -> None:
        """Remove everything."""
        self._firsts.clear()
        self._lasts.clear()

    def ranges(self) -> Ranges:
        """All of them."""
        flat = [0] * (2 * len(self._firsts))
        flat[::2], flat[1::2] = self._firsts, self._lasts
        return tuple(flat)


class RunMap:
    """Runs by the number of their first item, and so every item in them by its number."""

    __slots__ = ("_runs", "_starts", "count")

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._starts: list[int] = []
        self.count = 0
        """Numbers in it."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __iter__(self) -> Iterator[tuple[int, Run]]:
        """Each run with its first number, ascending."""
        return ((start, self._runs[start]) for start in self._starts)

    @property
    def first(self) -> int:
        """The lowest number; there must be one."""
        return self._starts[0]

    def add(self, number: int, run: Run) -> None:
        """Add a run whose first item has this number; none of its numbers may be there."""
        starts = self._starts
        if starts and starts[-1] > number:
            insort(starts, number)
        else:
            starts.append(number)
        self._runs[number] = run
        self.count += run.count

    def ranges(self) -> Ranges:
        """All numbers."""
        flat: list[int] = []
        for start in self._starts:
            flat += (start, start + self._runs[start].count - 1)
        return tuple(flat)

    def missing(self, ranges: Sequence[int]) -> int:
        """How many of these numbers are not here."""
        return length(ranges) - sum([last - first + 1 for first, last in self._here(ranges)])

    def cut(self, ranges: Sequence[int]) -> tuple[list[Run], Ranges]:
        """Take these numbers out, as far as they are here: the runs, and which numbers."""
        runs: list[Run] = []
        found: list[int] = []
        for first, last in list(self._here(ranges)):
            at = bisect_right(self._starts, first) - 1
            start = self._starts.pop(at)
            run = self._runs.pop(start)
            if start < first:
                self._insert(at, start, run.split(first - start))
                at += 1
            rest = run if first + run.count - 1 > last else None
            if rest is not None:
                run = rest.split(last - first + 1)
                self._insert(at, last + 1, rest)
            self.count -= run.count
            runs.append(run)
            found += (first, last)
        return runs, tuple(found)

    def _insert(self, at: int, number: int, run: Run) -> None:
        self._starts.insert(at, number)
        self._runs[number] = run

    def _here(self, ranges: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The parts of these numbers which are here, each within one run."""
        starts, runs = self._starts, self._runs
        for first, last in pairs(ranges):
            for start in starts[
                max(bisect_right(starts, first) - 1, 0) : bisect_right(starts, last)
            ]:
                low, high = max(first, start), min(last, start + runs[start].count - 1)
                if low <= high:
                    yield low, high


def orders_of(runs: Sequence[Run]) -> Ranges:
    """The orders of these runs; at a consumer, the tags."""
    orders = Spans()
    for run in runs:
        orders.add(run.order, run.order + run.count - 1)
    return orders.ranges()

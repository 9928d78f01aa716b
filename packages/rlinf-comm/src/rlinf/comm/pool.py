"""Pool: shared memory that messages are written into, used again and again.

Fresh pages cost about ten times what writing to used ones costs, so memory that comes back is
handed out before new memory is asked for. What nobody used for a while goes back to the system.
"""

import bisect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlinf.comm.errors import PoolExhausted
from rlinf.comm.segment import PAGE, AnonymousSegment, OwnSegment, Segment

FIRST_SEGMENT_BYTES = 64 << 20
DEFAULT_POOL_BYTES = 4 << 30
LARGE_BYTES = 1 << 20

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Shelf:
    """The free places of one segment: first fit by address, neighbours merged. No I/O."""

    def __init__(self, size: int) -> None:
        self._starts = [0]
        self._sizes = {0: size}
        self.size = size
        self.used = 0

    def take(self, length: int) -> int | None:
        """The offset of a free place of that length, if there is one."""
        for index, start in enumerate(self._starts):
            room = self._sizes[start]
            if room >= length:
                del self._sizes[start]
                if room == length:
                    del self._starts[index]
                else:
                    self._starts[index] = start + length
                    self._sizes[start + length] = room - length
                self.used += length
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """A place is free again."""
        self.used -= length
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + length:
            length += self._sizes.pop(self._starts.pop(index))
        if index:
            before = self._starts[index - 1]
            if before + self._sizes[before] == start:
                self._sizes[before] += length
                return
        self._starts.insert(index, start)
        self._sizes[start] = length


class _Shelved:
    """A segment, what is free of it, and how much of it has pages."""

    __slots__ = ("idle", "populated", "segment", "shelf")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.shelf = Shelf(segment.size)
        self.populated = 0
        self.idle = False


class Lent(NamedTuple):
    """A place of a pool: whoever has `array` (or a view of it) has the place."""

    array: Bytes
    segment: Segment
    offset: int


class _Loan(weakref.ref[Bytes]):
    """Tells when the last view on a place is gone."""

    __slots__ = ("length", "shelved", "start")

    shelved: _Shelved
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool has and how much of it is in use."""

    segments: int
    size_bytes: int
    used_bytes: int
    limit_bytes: int


class Pool:
    """Thread-safe. A place is free again when the last array on it is gone.

    Args:
        limit_bytes: Bound of all segments together; 0: a fifth of the free memory, at most 4 GiB.
        create: Makes a segment of a given size.

    Raises:
        PoolExhausted: The limit is more than the memory there is.
    """

    def __init__(
        self, limit_bytes: int = 0, create: Callable[[int], Segment] = OwnSegment.create
    ) -> None:
        self._create = create
        available = available_bytes()
        if limit_bytes > available:
            raise PoolExhausted(
                f"pool_bytes={limit_bytes} is more than the {available} bytes of memory that are "
                "free: lower pool_bytes",
                needed_bytes=limit_bytes,
                limit_bytes=available,
            )
        self.limit = limit_bytes or max(PAGE, min(DEFAULT_POOL_BYTES, available // 5))
        self._lock = threading.RLock()
        self._segments: list[_Shelved] = []
        self._loans: dict[int, _Loan] = {}
        # Filled by finalizers, which may run anywhere and so must not take a lock.
        self._returned: deque[_Loan] = deque()

    def allocate(self, nbytes: int) -> Lent | None:
        """A place of that many bytes, page-aligned; None where the pool is full at present.

        Raises:
            PoolExhausted: It is more than the whole pool, or the system has no more memory.
        """
        length = (max(nbytes, 1) + PAGE - 1) // PAGE * PAGE
        if length > self.limit:
            raise too_much(nbytes, self.limit)
        with self._lock:
            self._collect()
            for shelved in self._segments:
                start = shelved.shelf.take(length)
                if start is not None:
                    return self._lend(shelved, start, length, nbytes)
            shelved_new = self._grow(length)
            if shelved_new is None:
                return None
            start = shelved_new.shelf.take(length)
            assert start is not None
            return self._lend(shelved_new, start, length, nbytes)

    def trim(self) -> None:
        """Give back the segments that nobody has used since the last `trim`."""
        with self._lock:
            self._collect()
            kept = [s for s in self._segments if s.shelf.used or not s.idle]
            for shelved in kept:
                shelved.idle = not shelved.shelf.used
            self._segments = kept

    def statistics(self) -> PoolStatistics:
        """What it has and how much of it is in use."""
        with self._lock:
            self._collect()
            return PoolStatistics(
                len(self._segments),
                sum(s.segment.size for s in self._segments),
                sum(s.shelf.used for s in self._segments),
                self.limit,
            )

    def _lend(self, shelved: _Shelved, start: int, length: int, nbytes: int) -> Lent:
        shelved.idle = False
        end = start + length
        if end > shelved.populated:
            try:
                shelved.segment.populate(shelved.populated, end - shelved.populated)
            except PoolExhausted:
                shelved.shelf.give(start, length)
                raise
            shelved.populated = end
        array = shelved.segment.slice(start, nbytes)
        loan = _Loan(array, self._come_back)
        loan.shelved, loan.start, loan.length = shelved, start, length
        self._loans[id(loan)] = loan
        return Lent(array, shelved.segment, start)

    def _come_back(self, loan: weakref.ref[Bytes]) -> None:
        self._returned.append(loan)  # type: ignore[arg-type]

    def _collect(self) -> None:
        while self._returned:
            loan = self._returned.popleft()
            del self._loans[id(loan)]
            loan.shelved.shelf.give(loan.start, loan.length)

    def _grow(self, length: int) -> _Shelved | None:
        have = sum(s.segment.size for s in self._segments)
        left = self.limit - have
        if length > left:
            self._segments = [s for s in self._segments if s.shelf.used]
            left = self.limit - sum(s.segment.size for s in self._segments)
        if length > left:
            return None
        size = min(max(length, FIRST_SEGMENT_BYTES, have), left)
        shelved = _Shelved(self._create(size // PAGE * PAGE))
        self._segments.append(shelved)
        return shelved


class PrivateMemory:
    """Memory for what is received over a stream: large blocks come from a pool that no other
    process sees, so that they are warm; small ones from numpy.

    Args:
        limit_bytes: As of `Pool`.
        later: Runs an action after a while; called whenever there is something to give back.
    """

    def __init__(self, limit_bytes: int, later: Callable[[Callable[[], None]], object]) -> None:
        self._pool = Pool(limit_bytes, self._segment)
        self._later = later
        self._waiting = False

    def __call__(self, nbytes: int) -> memoryview:
        """Writable, not cleared."""
        if nbytes < LARGE_BYTES or nbytes > self._pool.limit:
            return np.empty(nbytes, np.uint8).data
        lent = self._pool.allocate(nbytes)
        return np.empty(nbytes, np.uint8).data if lent is None else lent.array.data

    def _segment(self, size: int) -> Segment:
        segment = AnonymousSegment.create(size)
        self._trim_later()
        return segment

    def _trim_later(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._later(self._trim)

    def _trim(self) -> None:
        """Give back what nobody has used since the last time."""
        self._pool.trim()
        self._waiting = False
        if self._pool.statistics().segments:
            self._trim_later()


def too_much(nbytes: int, limit: int) -> PoolExhausted:
    """The error for what no pool of that size could ever hold."""
    return PoolExhausted(
        f"{nbytes} bytes are more than the whole pool: raise pool_bytes={limit}, "
        "or send less at once",
        needed_bytes=nbytes,
        limit_bytes=limit,
    )


def available_bytes() -> int:
    """Memory that could be had now: of the host, and of the container's limit if it has one."""
    found = [1 << 62]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        numbers = [*_lines(limit), *_lines(used)]
        if len(numbers) == 2 and all(number.strip().isdigit() for number in numbers):
            found.append(int(numbers[0]) - int(numbers[1]))
    return max(PAGE, min(found))


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return ()

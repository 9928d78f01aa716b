"""Items waiting in one channel, in order, with an index by key."""

from collections import deque
from collections.abc import Iterator, Sequence

from rlinf.channel.run import Run

TOLERANCE = 1e-9
"""Relative; sums of weights such as ten times 0.1 count as exact."""


class Lane:
    """Runs in order of admission; one that comes back takes its old place again.

    A run with a key stands in two lanes and is taken through one: what was taken is empty in the
    other until that comes to the front.
    """

    __slots__ = ("count", "runs", "weight")

    def __init__(self) -> None:
        self.runs: deque[Run] = deque()
        """The first is never empty; others may be."""
        self.count = 0
        """Items in it."""
        self.weight = 0.0
        """Total weight; 0 exactly when empty."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Run]:
        return (run for run in self.runs if run.count)

    def head(self) -> Run:
        """The first run; the lane must not be empty."""
        return self.runs[0]

    def append(self, run: Run) -> None:
        """Add a run whose order is above every other's."""
        self.runs.append(run)
        self.count += run.count
        self.weight += run.weight

    def lose(self, run: Run) -> None:
        """Reckon with what was taken out of it as `run`, here or through another lane."""
        runs = self.runs
        while runs and not runs[0].count:
            runs.popleft()
        self.count -= run.count
        self.weight = self.weight - run.weight if self.count else 0.0

    def restore(self, returned: Sequence[Run]) -> None:
        """Put runs back where their order belongs (`returned` ascends)."""
        runs = self.runs
        self.count += sum([run.count for run in returned])
        self.weight += sum([run.weight for run in returned])
        last = returned[-1].order
        before: list[Run] = []
        while runs and runs[0].order < last:
            before.append(runs.popleft())
        whole = [run for run in before if run.count]
        runs.extendleft(sorted([*whole, *returned], key=lambda run: run.order, reverse=True))


class Lanes:
    """Every queued item of a channel: one lane over all, and one for each key in use."""

    __slots__ = ("all", "by_key")

    def __init__(self) -> None:
        self.all = Lane()
        self.by_key: dict[str, Lane] = {}

    def __len__(self) -> int:
        return self.all.count

    def get(self, key: str | None) -> Lane | None:
        """The lane of a key, or of everything for None; None if no such item is queued."""
        return self.all if key is None else self.by_key.get(key)

    def append(self, run: Run) -> None:
        """Add a run at the end."""
        self.all.append(run)
        if run.key is not None:
            self.by_key.setdefault(run.key, Lane()).append(run)

    def take_first(self, count: int, key: str | None) -> list[Run]:
        """Take out the first so many items of a key, or of all."""
        lane = self.all if key is None else self.by_key[key]
        taken: list[Run] = []
        while count:
            run = lane.runs[0]
            if run.key is None and run.count <= count:
                lane.runs.popleft()  # it stands here only
            else:
                run = run.split(min(count, run.count))
            taken.append(run)
            count -= run.count
            self._lose(run)
        return taken

    def _lose(self, run: Run) -> None:
        self.all.lose(run)
        if run.key is not None:
            lane = self.by_key[run.key]
            lane.lose(run)
            if not lane.count:
                del self.by_key[run.key]

    def restore(self, returned: Sequence[Run]) -> None:
        """Put runs back at the front, each where its order belongs."""
        if not returned:
            return
        ordered = sorted(returned, key=lambda run: run.order)
        self.all.restore(ordered)
        for key in {run.key for run in ordered if run.key is not None}:
            lane = self.by_key.setdefault(key, Lane())
            lane.restore([run for run in ordered if run.key == key])


def batch(lane: Lane, max_items: int | None, target_weight: float | None) -> tuple[int, bool]:
    """How many items a batch would hold if it were taken now, and whether it is complete.

    Complete: `max_items` are there, or they weigh exactly `target_weight`, or the next one would
    exceed it. An item heavier than the target is a complete batch alone.
    """
    if target_weight is None:
        complete = max_items is not None and lane.count >= max_items
        return (max_items or 0) if complete else lane.count, complete
    count = 0
    weight = 0.0
    for run in lane:
        fits = run.within_weight(target_weight * (1 + TOLERANCE) - weight)
        if not fits and not count:
            return 1, True
        if max_items is not None and count + fits >= max_items:
            return max_items, True
        count += fits
        weight += run.weigh(fits)
        if fits < run.count or weight >= target_weight * (1 - TOLERANCE):
            return count, True
    return count, False

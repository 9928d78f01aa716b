"""What a part of a chain costs at least together with the rest of the chain.

On a chain every component lies on the only path, so each adds at least the time of one
micro-batch to any plan; and a pipelined neighbour needs devices of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlinf.sched.cost import CostModel, bits
from rlinf.sched.cuts import Task
from rlinf.sched.fit import Floats
from rlinf.sched.front import Front
from rlinf.sched.machine import Counts

NEVER = 1 << 40
"""More devices than there are."""


@dataclass(slots=True)
class ChainBounds:
    """Bounds for a chain on one kind of resource.

    Attributes:
        micro_batches: the numbers that are tried.
    """

    model: CostModel
    micro_batches: Sequence[int]
    _floors: list[float] = field(init=False)
    _quickest: list[float] = field(init=False)
    _least: dict[tuple[int, int], int] = field(default_factory=dict)
    _ends: dict[tuple[int, int], float] = field(default_factory=dict)
    _steps: dict[tuple[int, int], tuple[Counts, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tried = {1, *self.micro_batches}
        everyone = range(len(self.model.names))
        self._floors = [self._least_time(i, dict.fromkeys((1, max(tried)), 1)) for i in everyone]
        self._quickest = [self._least_time(i, {p: p for p in tried}) for i in everyone]

    def _least_time(self, i: int, times: dict[int, int]) -> float:
        """Least seconds of component ``i``, by number of parts so many times those of one part."""
        found = [k * self.model.options(i, p).seconds.min(initial=np.inf) for p, k in times.items()]
        return float(min(found)) if np.isfinite(min(found)) else 0.0

    def floor(self, members: int) -> float:
        """What the components of a set add to any plan at least."""
        return sum(f for i, f in enumerate(self._floors) if members >> i & 1)

    def rest(self, task: Task) -> float:
        """What the components outside a task add: on either side the slowest as a whole where
        they only take turns with it, else each one micro-batch."""
        if not task.top:
            return self.floor(~task.members)
        inside = bits(task.members)
        before, after = self._quickest[: inside[0]], self._quickest[inside[-1] + 1 :]
        return max(before, default=0.0) + max(after, default=0.0)

    def with_neighbours(self, front: Front, task: Task) -> Floats:
        """Least end of each row with the pipelined neighbours on the devices left; (rows,)."""
        inside, parts, labels = bits(task.members), task.parts, front.labels
        left = self.model.machine.counts[0] - front.used[:, 0]
        ends = labels.x()
        sides = []
        if task.takes and inside[0] > 0:
            sides.append((inside[0] - 1, labels.ie()))
        if task.gives and inside[-1] + 1 < len(self.model.names) and labels.curve is None:
            sides.append((inside[-1] + 1, labels.so()))
        for i, (first, period) in sides:
            one = self._quickest_on(i, parts, left)
            entry = self.model.own_profile(i)
            fill = 0.0 if entry is not None and entry.uneven else one
            piped = first + np.maximum(fill + (parts - 1) * period, parts * one)
            in_one = first + (parts - 1) * period + self._quickest_on(i, 1, left)
            others = self.floor(~(task.members | 1 << i))
            ends = np.maximum(ends, np.minimum(piped, in_one) + others)
        return ends

    def side_by_side(self, left: int, parts: int) -> float:
        """Least seconds of component ``left`` beside the next one, in so many micro-batches.

        Either works in parts, or on the whole batch as half of a group in turn.
        """
        key = (left, parts)
        if key not in self._ends:
            least = np.inf
            for p in (parts, 1):
                options = self.model.options(left, p)
                one, rest = options.seconds * p, self.model.machine.counts[0] - options.used[:, 0]
                piped = self._quickest_on(left + 1, parts, rest) * parts
                in_one = self._quickest_on(left + 1, 1, rest)
                both = np.maximum(one, piped) if p > 1 else one + piped
                least = min(least, np.minimum(both, one + in_one).min(initial=np.inf))
            self._ends[key] = least
        return self._ends[key]

    def reserved(self, task: Task, ceiling: float) -> int:
        """Fewest devices that the pipelined neighbours of a task need to stay below a ceiling."""
        inside = bits(task.members)
        needed = 0
        if task.takes and inside[0] > 0:
            needed += self._least_size(inside[0] - 1, task.parts, ceiling)
        if task.gives and inside[-1] + 1 < len(self.model.names):
            needed += self._least_size(inside[-1] + 1, task.parts, ceiling)
        return needed

    def _least_size(self, i: int, parts: int, ceiling: float) -> int:
        """As for the first ceiling asked about: later ones are lower, so that it stays a bound."""
        key = (i, parts)
        if key not in self._least:
            limit = ceiling - self.floor(~(1 << i))
            least = []
            for p in (parts, 1):
                options = self.model.options(i, p)
                enough = np.flatnonzero(options.seconds * p <= limit)
                least += [int(options.used[enough[0], 0])] if len(enough) else []
            self._least[key] = min(least, default=NEVER)
        return self._least[key]

    def _quickest_on(self, i: int, parts: int, devices: Counts) -> Floats:
        """Seconds of one part of component ``i`` on at most so many devices."""
        key = (i, parts)
        if key not in self._steps:
            options = self.model.options(i, parts)
            seconds = np.concatenate([[np.inf], options.seconds])
            self._steps[key] = np.ascontiguousarray(options.used[:, 0]), seconds
        used, seconds = self._steps[key]
        return np.asarray(seconds[used.searchsorted(devices, side="right")])

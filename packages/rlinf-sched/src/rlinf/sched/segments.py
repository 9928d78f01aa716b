"""What components cost inside pipelines, by how finely these cut the batch.

Many micro-batches fill a pipeline quickly but pay overheads often; few do the opposite. A bound has
to know the number to charge for both. Numbers are told apart in *grains*: the whole batch at once,
fewer micro-batches than the best plan found, as many, and more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.fit import Floats
from rlinf.sched.machine import Counts
from rlinf.sched.packing import leaf, numbers, units_of
from rlinf.sched.tree import Leaf, Loop, Spatial, Tree

Grain = tuple[int, ...]

MOST = 6
"""Components up to which grains are told apart."""


class Ways(NamedTuple):
    """Grains of the first part, of the second, and of the set that they make; same lengths."""

    first: Counts
    second: Counts
    whole: Counts


@dataclass(frozen=True, slots=True)
class Prices:
    """Components at every grain.

    Attributes:
        seconds: by component, least seconds of its run; shape (grains, units + 1).
        steps: by component, least seconds of one micro-batch; same shape.
    """

    seconds: Sequence[Floats]
    steps: Sequence[Floats]

    @property
    def grains(self) -> int:
        """How many grains are told apart."""
        return len(self.seconds[0])


def grains(model: CostModel, best: Tree, micro_batches: Sequence[int] = ()) -> Sequence[Grain]:
    """The whole batch, and numbers below, at and above that of the best plan's finest pipeline.

    Large workflows are not told apart: what is missing from their bounds lies elsewhere.
    """
    if len(model.names) > MOST:
        return (tuple(numbers(model.batch, micro_batches)),)
    middle = _finest(best)
    found = [m for m in numbers(model.batch, micro_batches) if m > 1]
    parted = (
        tuple(m for m in found if m < middle),
        tuple(m for m in found if m == middle),
        tuple(m for m in found if m > middle),
    )
    return ((1,), *(grain for grain in parted if grain))


def _finest(tree: Tree) -> int:
    if isinstance(tree, Leaf | Loop):
        return 1
    own = tree.micro_batches if isinstance(tree, Spatial) else 1
    return max(own, _finest(tree.first), _finest(tree.second))


def prices(model: CostModel, found: Sequence[Grain]) -> Prices:
    """Prices of every component at every grain."""
    units, width = units_of(model)
    seconds, steps = [], []
    for i in range(len(model.names)):
        entry = model.own_profile(i)
        even = entry is None or not entry.uneven
        run, step = np.full((2, len(found), units + 1), np.inf)
        for row, grain in enumerate(found):
            for parts in grain:
                if parts > 1 and not model.chunkable(i):
                    continue
                options = model.options(i, parts)
                ways = options.devices.astype(float), options.seconds
                total = leaf([(ways[0], ways[1] * (1 if options.loops else parts))], units, width)
                one = leaf([ways], units, width)
                if options.loops or not even:
                    one = np.where(np.isfinite(one), 0.0, np.inf)
                run[row], step[row] = np.minimum(run[row], total), np.minimum(step[row], one)
        seconds.append(run)
        steps.append(step)
    return Prices(seconds, steps)


@cache
def ways_in_turn(count: int) -> Ways:
    """Within a pipeline, either part may stand outside and have the whole batch at once."""
    found = [(0, 0, 0)]
    for c in range(1, count):
        found += [(c, c, c), (0, c, c), (c, 0, c), (0, 0, c)]
    return _ways(found)


@cache
def ways_beside(count: int, first_single: bool, second_single: bool) -> Ways:
    """Both parts are cut alike, or one is a component that has the whole batch at once."""
    found = [(0, 0, 0)]
    for c in range(1, count):
        found += [(c, c, c)] + [(0, c, c)] * first_single + [(c, 0, c)] * second_single
    return _ways(found)


def _ways(found: Sequence[tuple[int, int, int]]) -> Ways:
    return Ways(*np.array(found).T)

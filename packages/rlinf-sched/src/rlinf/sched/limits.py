"""Raising a limit until there is a plan within it: plans, and what none can beat."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.layout import Layout
from rlinf.sched.packing import Packing
from rlinf.sched.polish import polish
from rlinf.sched.tree import Parallel, Spatial, Temporal, Tree, leaves, width
from rlinf.sched.trial import TooManyError, Trial

FIRST = 1.003
"""A limit lies at least so far above what is ruled out already."""

STEPS = ((5e5, 1.05), (5e6, 1.03), (np.inf, 1.02))
"""The steps from a limit to the next after trials of up to so much work."""

WIDE = 300
"""With so many sets every step is the smallest."""

CLOSE = 1.0195
"""A plan so close to the bound ends the search; once one is known, the limit to rule out is so far
below it."""

ALIKE = (175, 90, 45, 32, 22, 11)
"""Ticks by which labels may differ that become one: coarse at first, finer while plans are not
close to the bound."""

WORK = 8e7, 2e7
"""Work of all trials together: for workflows that are no chain, of LARGE components and more; for
others."""

LARGE = 8

GROWTH = 1.2
"""A trial is likely to take so much more work than the one before; with less left, none begins."""

DEAR = 3e6
"""After a trial of so much work without a plan, one is looked for elsewhere: it may do."""

REGROWN = 3
"""Labels whose plans are laid out in time, those that end first."""

ROUNDING = 1 - 1e-9


Found = tuple[float, Tree | None]
"""Seconds of a plan, and the plan; None: there is none."""


class Raised(NamedTuple):
    """What trials of limits have shown.

    Attributes:
        seconds: what no plan can beat.
        tree: the quickest plan seen; None: none.
    """

    seconds: float
    tree: Tree | None


def raised(
    model: CostModel,
    packing: Packing,
    low: float,
    micro_batches: Sequence[int] = (),
    other: Callable[[], Tree | None] | None = None,
) -> Raised:
    """Raise a lower bound as far as it goes.

    Args:
        low: seconds that no plan can beat.
        micro_batches: the only numbers allowed beside 1; empty: powers of two.
        other: finds a plan in another way; asked once, where trials that found none get dear.
    """
    layout = Layout.of(model, packing, micro_batches)
    found: Found = np.inf, None
    left = WORK[model.chain or len(model.names) < LARGE]
    likely, step, finer = 0.0, FIRST, list(ALIKE)
    while finer and found[0] > low * CLOSE and likely <= left:
        limit = max(low * FIRST, min(low * step, found[0] / CLOSE))
        trial = Trial(layout, limit, finer[0], left)
        try:
            least = trial.least()
        except TooManyError:
            break
        left, likely = left - trial.work, trial.work * GROWTH
        layout = replace(layout, spans=trial.spans())
        low = max(low, min(trial.limit, least) * ROUNDING)
        if np.isinf(least):
            step = _step(trial)
        else:
            found = min(found, regrown(model, trial, micro_batches), key=lambda one: one[0])
            finer.pop(0)
        if other is not None and trial.work > DEAR and found[1] is None:
            found, other = _timed(model, other()), None
    return Raised(low, found[1])


def _timed(model: CostModel, tree: Tree | None) -> Found:
    return (np.inf, None) if tree is None else (evaluate(tree, model).seconds, tree)


def _step(trial: Trial) -> float:
    if len(trial.layout.sets) >= WIDE:
        return STEPS[-1][1]
    return next(step for work, step in STEPS if trial.work <= work)


def regrown(model: CostModel, trial: Trial, micro_batches: Sequence[int] = ()) -> Found:
    """The best plan of those of the least labels, with any number of micro-batches; its seconds.

    None where all need more than the devices there are.
    """
    if model.tight or len(model.machine.counts) > 1:
        return np.inf, None
    layout = trial.layout
    last = len(layout.sets) - 1
    trees: list[Tree] = []
    for row in np.argsort(trial.rows[last].ends)[:REGROWN]:
        grown = [Regrowth(model, trial, k).tree(last, int(row)) for k in (0, *layout.numbers)]
        trees += grown if max(width(grown[0]).values()) <= model.machine.counts[0] else []
    return polish(trees, model, micro_batches) if trees else (np.inf, None)


class Regrowth:
    """Trees of the labels of a trial, with ``parts`` micro-batches in every pipeline.

    With ``parts`` 0 every component has those of its label.
    """

    def __init__(self, model: CostModel, trial: Trial, parts: int) -> None:
        self.model, self.trial, self.parts = model, trial, parts

    def tree(self, k: int, row: int, piped: bool = False) -> Tree:
        """Of a row of a set; ``piped``: within a pipeline."""
        layout = self.trial.layout
        cut, i, j = (int(value) for value in self.trial.rows[k].back[row])
        if not len(layout.cuts[k]):
            component = layout.sets[k].bit_length() - 1
            ways = layout.ways[component]
            own = layout.numbers[int(ways.number[j])]
            stated = own == 1 or not piped or not self.parts
            return self.model.options(component, own).leaf(i, own if stated else None)
        p, q = (int(part) for part in layout.cuts[k][cut // 2])
        one, other = layout.sets[p], layout.sets[q]
        if cut % 2:
            return Temporal(
                self.tree(p, i, piped), self.tree(q, j, piped), self.model.switch(one, other)
            )
        fed = any(one >> a & 1 and after & other for a, after in enumerate(self.model.succ))
        if not fed and not piped:
            return Parallel(self.tree(p, i), self.tree(q, j))
        first, second = self.tree(p, i, True), self.tree(q, j, True)
        return Spatial(first, second, self.parts or _most(first, second))


def _most(*trees: Tree) -> int:
    return max(leaf.micro_batches or 1 for tree in trees for leaf in leaves(tree))

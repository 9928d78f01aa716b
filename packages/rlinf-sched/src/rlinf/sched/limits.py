"""Raising a limit until there is a plan within it: plans, and what none can beat."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.layout import Layout
from rlinf.sched.packing import Packing
from rlinf.sched.tree import Parallel, Spatial, Temporal, Tree, width
from rlinf.sched.trial import LATE, TooManyError, Trial

FIRST, STEP, FINE = 1.003, 1.02, 1.007
"""A limit lies above what is ruled out already by the first of these, then by the second, and by
the third once that was possible but no plan so quick was found."""

MOST, MORE = 2000, 4000
"""Labels kept of a set, and with the finest steps."""

WORK = 2e8, 2e6
"""Work of all trials together: for workflows that are no chain, of LARGE components and more; for
others, which the search on narrow fronts plans well."""

LARGE = 8

ROUNDING = 1 - 1e-9


class Raised(NamedTuple):
    """What trials of limits have shown.

    Attributes:
        seconds: what no plan can beat none of whose pipelines lies inside one with another number
            of micro-batches.
        tree: the quickest plan seen; None: none.
    """

    seconds: float
    tree: Tree | None


def raised(
    model: CostModel, packing: Packing, low: float, micro_batches: Sequence[int] = ()
) -> Raised:
    """Raise a lower bound as far as it goes.

    Args:
        low: seconds that no plan can beat.
        micro_batches: the only numbers allowed beside 1; empty: any.
    """
    layout = Layout.of(model, packing, micro_batches)
    best, quickest = None, np.inf
    left = WORK[model.chain or len(model.names) < LARGE]
    step, most = FIRST, MOST
    while True:
        trial = Trial(layout, low * step, most, left)
        try:
            least = trial.least()
        except TooManyError:
            break
        left -= trial.work
        low = max(low, min(trial.limit, least) * ROUNDING)
        if np.isinf(least):
            step = STEP if most == MOST else FINE
            continue
        tree = Regrowth(model, trial).tree()
        seconds = evaluate(tree, model).seconds if tree is not None else np.inf
        if seconds < quickest:
            best, quickest = tree, seconds
        if quickest <= low * STEP or most == MORE or tree is None:
            break
        step, most = FINE, MORE
    return Raised(low, best)


class Regrowth:
    """The quickest plan of a trial that has found one."""

    def __init__(self, model: CostModel, trial: Trial) -> None:
        self.model, self.trial, self.layout = model, trial, trial.layout

    def tree(self) -> Tree | None:
        """Its tree; None where it needs more than the devices there are."""
        model = self.model
        if model.tight or len(model.machine.counts) > 1:
            return None
        last = len(self.layout.sets) - 1
        tree = self._outside(last, self.layout.units)
        return tree if max(width(tree).values()) <= model.machine.counts[0] else None

    def _outside(self, k: int, units: int) -> Tree:
        """A set outside of pipelines."""
        trial = self.trial
        ends = int(trial.alone[k, units])
        rows = trial.rows.get(k)
        if rows is not None:
            found = np.flatnonzero((rows.ends == ends) & (rows.used <= units))
            if len(found):
                return self._inside(k, int(found[0]), 1)
        for at in trial.alive[k]:
            p, q = (int(part) for part in self.layout.cuts[k][at])
            switch = int(self.layout.switches[k][at] / trial.tick)
            first, second = trial.alone[p], trial.alone[q]
            for n in range(units + 1):
                if first[n] + second[n] + switch == ends:
                    return self._in_turn(k, at, self._outside(p, n), self._outside(q, n))
                if max(first[n], second[units - n]) == ends < LATE and self._apart(p, q):
                    return Parallel(self._outside(p, n), self._outside(q, units - n))
        raise AssertionError("an end that nothing has")

    def _inside(self, k: int, row: int, around: int) -> Tree:
        """A row within a pipeline of ``around`` micro-batches."""
        rows, layout = self.trial.rows[k], self.layout
        what, i, j = (int(value) for value in rows.back[row])
        parts = layout.numbers[int(rows.number[row])]
        if not len(layout.cuts[k]):
            component = layout.sets[k].bit_length() - 1
            options = self.model.options(component, parts)
            return options.leaf(i, None if parts == around else parts)
        p, q = (int(part) for part in layout.cuts[k][what // 2])
        if what % 2:
            around = max(around, 1)
            first, second = self._inside(p, i, around), self._inside(q, j, around)
            return self._in_turn(k, what // 2, first, second)
        around = around if around > 1 else parts
        return Spatial(self._inside(p, i, around), self._inside(q, j, around), around)

    def _in_turn(self, k: int, at: int, first: Tree, second: Tree) -> Tree:
        p, q = (self.layout.sets[int(part)] for part in self.layout.cuts[k][at])
        return Temporal(first, second, self.model.switch(p, q))

    def _apart(self, p: int, q: int) -> bool:
        first, second = self.layout.sets[p], self.layout.sets[q]
        succ = self.model.succ
        return not any(first >> i & 1 and succ[i] & second for i in range(len(succ)))

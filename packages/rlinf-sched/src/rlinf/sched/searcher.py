"""Search for the quickest plan: dynamic programming over convex sets of the workflow.

Every cut of a set into a down-set and the rest is tried, side by side for every number of
micro-batches, and in turn. What is kept of a set is a front, see :mod:`rlinf.sched.front`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf.sched import algebra, compose, crossing
from rlinf.sched.algebra import Labels
from rlinf.sched.chain_bounds import ChainBounds
from rlinf.sched.config import SearchConfig
from rlinf.sched.cost import CostModel, bits
from rlinf.sched.cuts import Cut, Task, all_cuts, few_cuts, wiring
from rlinf.sched.front import Front, Op, Origin, join, narrow, prune
from rlinf.sched.machine import Counts
from rlinf.sched.pairing import in_turn, side_by_side

SLACK = 1 + 1e-9

FEW = 4
"""About so many numbers of micro-batches are tried with narrow fronts; fewer from MANY on."""

MANY = 8
"""Components from which on a workflow is large."""

ALL_CUTS = 5
"""Components up to which narrow fronts are composed over all cuts, not along one order."""

IN_TURN = 4
"""With narrow fronts and cuts along one order, most components of a group in turn within a
pipeline."""

FINEST = 1 << 16
"""More micro-batches are not tried on our own account."""

WORTH = 16
"""Fronts from so many rows on are also pruned by what their neighbours need."""

HYBRID_SLACK = 3.0
"""The best hybrid may be that much slower than the best plan."""

DAG_SLACK = 1.25
"""Where departures meet, plans may be priced too high: those up to this factor above the best
are laid out in time before one is chosen."""


@dataclass(slots=True)
class Searcher:
    """One search; fronts are remembered by their task.

    Attributes:
        model: prices.
        config: limits.
        ceiling: only plans quicker than this matter.
        sizes: how many options of each component to look at at most; 0: all.
        narrow: keep few rows of each front; the bound then says nothing.
        guide: the promising cuts of a set of a large workflow; None: those along one order.
        bounds: what the rest of a chain costs at least; None: the workflow is no chain.
        bound: relative error which thinned fronts can have caused so far.
    """

    model: CostModel
    config: SearchConfig
    ceiling: float = np.inf
    sizes: int = 0
    narrow: bool = False
    guide: Callable[[int], Sequence[Cut]] | None = None
    bounds: ChainBounds | None = None
    bound: float = 0.0
    _fronts: dict[tuple[Task, bool], Front] = field(default_factory=dict)
    _cuts: dict[int, Sequence[Cut]] = field(default_factory=dict)
    _numbers: Sequence[int] | None = None

    def best(self) -> Front:
        """The quickest plans of the whole workflow within all resources, at most one a use."""
        everything = (1 << len(self.model.names)) - 1
        if self.model.chain and len(self.model.machine.counts) == 1:
            self.bounds = ChainBounds(self.model, self._micro_batches())
        return self.front(Task(everything, top=True))

    def front(self, task: Task, blocks: bool = False) -> Front:
        """The front of a task; ``blocks``: only single components and plans in turn."""
        if not task.takes and not task.gives:
            task = Task(task.members, beside=task.beside, top=task.top)
        elif self.narrow and not self.model.chain:
            task = self._merged(task)
        key = (task, blocks)
        if key not in self._fronts:
            single = not task.members & (task.members - 1)
            self._fronts[key] = self._single(task) if single else self._composed(task, blocks)
        return self._fronts[key]

    def _merged(self, task: Task) -> Task:
        """The same with every member that has a neighbour outside as a port: fewer tasks."""
        model, members = self.model, task.members
        takes = sum(1 << i for i in bits(members) if model.pred[i] & ~members)
        gives = sum(1 << i for i in bits(members) if model.succ[i] & ~members)
        return replace(task, takes=takes if task.takes else 0, gives=gives if task.gives else 0)

    def whole(self, task: Task) -> Front:
        """The set run outside the pipeline, seen by the pipeline around it."""
        inner = self.front(Task(task.members, beside=task.beside))
        if not task.takes and not task.gives:
            return inner
        labels = algebra.whole(inner.labels.x(), bool(task.takes), bool(task.gives), task.parts)
        rows = np.arange(len(inner))
        origin = Origin("whole", inner)
        return Front(
            inner.used, labels, (origin,), np.zeros_like(rows), rows, rows, inner.ordered,
            inner.bound,
        )  # fmt: skip

    def cuts(self, members: int) -> Sequence[Cut]:
        """The cuts of a convex set that are looked at."""
        if members not in self._cuts:
            if not self.narrow or len(self.model.names) <= ALL_CUTS:
                self._cuts[members] = tuple(all_cuts(self.model, members))
            elif self.guide is not None:
                self._cuts[members] = self.guide(members)
            else:
                self._cuts[members] = tuple(few_cuts(self.model, members))
        return self._cuts[members]

    # Single components

    def _single(self, task: Task) -> Front:
        i = task.members.bit_length() - 1
        piped = bool(task.takes or task.gives)
        options = self.model.options(i, task.parts if piped else 1, task.beside)
        if self.sizes and len(options.seconds) > self.sizes:
            wanted = np.geomspace(1, len(options.seconds), self.sizes).round().astype(np.int64) - 1
            chosen = np.unique(wanted)
        else:
            chosen = np.arange(len(options.seconds))
        seconds = options.seconds[chosen]
        if piped and not self.model.chunkable(i):
            chosen, seconds = chosen[:0], seconds[:0]
        labels = self._leaf_labels(i, seconds, options.devices[chosen], task)
        origin = Origin("leaf", parts=task.parts if piped else 1, options=options)
        front = Front(
            options.used[chosen], labels, (origin,), np.zeros_like(chosen), chosen, chosen,
            ordered=options.used.shape[1] == 1 and labels.curve is None,
        )  # fmt: skip
        return self._affordable(front, task)

    def _leaf_labels(self, i: int, seconds: algebra.Floats, devices: Counts, task: Task) -> Labels:
        entry = self.model.own_profile(i)
        if task.gives and not task.takes and entry is not None and entry.uneven:
            curves = [entry.emitted(task.parts, float(n)) for n in devices]
            curve = np.array(curves).reshape(len(devices), task.parts)
            return algebra.source(seconds * task.parts, curve, task.parts)
        parts = task.parts if task.takes or task.gives else 1
        return algebra.leaf(seconds, bool(task.takes), bool(task.gives), parts)

    # Composed sets

    def _composed(self, task: Task, blocks: bool) -> Front:
        found = [] if self.config.kind == "spatial" else list(self._in_turn(task))
        alone = not task.takes and not task.gives
        if not blocks and self.config.kind != "temporal":
            if alone:
                self._tighten(task, found)
                found += [] if self.model.chain else self._independent(task)
                for parts in self._micro_batches():
                    found += self._piped(replace(task, parts=parts))
                    found += self._crossed(replace(task, parts=parts))
            else:
                found += self._piped(task)
        width = len(self.model.machine.counts)
        shape = Labels(np.zeros((0, 1)), bool(task.takes), bool(task.gives), task.parts)
        joined = join(found, _empty(shape), width)
        if task.top:
            hybrid = self.config.kind == "hybrid"
            if self._is_root(task) and (hybrid or not self.model.chain):
                return joined
            return _quickest(joined, each=hybrid)
        if self.narrow:
            return self._affordable(narrow(joined, self.config.beam), task)
        return self._affordable(prune(joined, self.config.front_limit, self.config.tolerance), task)

    def _tighten(self, task: Task, found: list[Front]) -> None:
        if self._is_root(task):
            for front in found:
                if len(front):
                    best = float(front.labels.x().min())
                    self.ceiling = min(self.ceiling, best * self.slack())

    def _in_turn(self, task: Task) -> Iterator[Front]:
        piped = bool(task.takes or task.gives)
        few = self.narrow and self.guide is None
        if few and piped and task.members.bit_count() > IN_TURN:
            return
        for cut in self.cuts(task.members):
            wires = wiring(task, cut, edge=False)
            for beside, op, switch_s in self._memory_ways(task, cut):
                first = Task(cut.first, task.takes & cut.first, task.gives & cut.first,
                             task.parts, task.beside | beside & cut.second, task.top)  # fmt: skip
                second = Task(cut.second, task.takes & cut.second, task.gives & cut.second,
                              task.parts, task.beside | beside & cut.first, task.top)  # fmt: skip
                for p, q in self._ways_in_turn(first, second):
                    rows = in_turn(p, q)
                    labels = compose.temporal(
                        task.parts, p.labels.take(rows[0]), q.labels.take(rows[1]), wires, switch_s
                    )
                    origin = Origin(op, p, q, task.parts, switch_s=switch_s)
                    yield self._kept(compose.front_of(origin, rows, labels), task)

    def _ways_in_turn(self, first: Task, second: Task) -> Iterator[tuple[Front, Front]]:
        """In or out of the pipeline around them; at least one of the two takes part in it."""
        piped_first = bool(first.takes or first.gives)
        piped_second = bool(second.takes or second.gives)
        if not piped_first and not piped_second:
            yield self.front(first), self.front(second)
            return
        if piped_first and piped_second:
            yield self.front(first), self.front(second)
            if self.narrow:
                return
        if piped_second:
            yield self.whole(first), self.front(second)
        if piped_first:
            yield self.front(first), self.whole(second)
        if not self.model.chain and not self.narrow:
            yield self.whole(first), self.whole(second)

    def _memory_ways(self, task: Task, cut: Cut) -> Iterator[tuple[int, Op, float]]:
        switch_s = self.model.switch(cut.first, cut.second)
        yield 0, "temporal", switch_s
        if self.model.tight and switch_s:
            yield task.members, "resident", 0.0

    def _independent(self, task: Task) -> Iterator[Front]:
        for cut in self.cuts(task.members):
            if cut.edge:
                continue
            first = self.front(Task(cut.first, beside=task.beside))
            second = self.front(Task(cut.second, beside=task.beside))
            rows = side_by_side(first, second, self.model.machine.counts, task.top)
            end = np.maximum(first.labels.x()[rows[0]], second.labels.x()[rows[1]])
            labels = Labels(end[:, None], False, False, 1)
            origin = Origin("parallel", first, second)
            yield self._kept(compose.front_of(origin, rows, labels), task)

    def _piped(self, task: Task) -> Iterator[Front]:
        """Side by side in micro-batches.

        On a chain only cuts beside a single component or a plan in turn are looked at: the others
        give the same plans in another order.
        """
        model, alone = self.model, not task.takes and not task.gives
        block_last = model.chain and bool(task.gives)
        for cut in self.cuts(task.members):
            if (alone and not cut.edge) or not self._promising(task, cut):
                continue
            feeding = [i for i in bits(cut.first) if model.succ[i] & cut.second]
            fed = [i for i in bits(cut.second) if model.pred[i] & cut.first]
            first = task.part(cut.first, 0, sum(1 << i for i in feeding))
            second = task.part(cut.second, sum(1 << i for i in fed), 0)
            p = self.front(first, blocks=model.chain and not block_last)
            if not len(p):
                continue
            q = self.front(second, blocks=block_last)
            rows = side_by_side(p, q, self._budget(task), task.top)
            wires = wiring(task, cut, cut.edge)
            labels = compose.spatial(
                task.parts, p.labels.take(rows[0]), q.labels.take(rows[1]), wires
            )
            origin = Origin("spatial", p, q, task.parts)
            front = self._kept(compose.front_of(origin, rows, labels), task)
            if task.top and len(front) and self._is_root(task):
                self.ceiling = min(self.ceiling, float(front.labels.x().min()) * self.slack())
            yield front

    def _crossed(self, task: Task) -> Iterator[Front]:
        """Two components in turn beside two in turn that both of them feed."""
        if self.model.chain or self.narrow:
            return

        def single(i: int, feeds: bool) -> Front:
            me = 1 << i
            ports = (0, me) if feeds else (me, 0)
            return self.front(Task(me, *ports, task.parts, task.beside))

        for cut in self.cuts(task.members):
            for front in crossing.crossed(self.model, cut, single, self._budget(task)):
                yield self._kept(front, task)

    def _micro_batches(self) -> Sequence[int]:
        """The numbers that are tried, the largest first."""
        if self._numbers is None:
            batch = self.model.batch
            wanted = self.config.micro_batches or tuple(
                2**k for k in range(1, batch.bit_length()) if 2**k <= min(batch, FINEST)
            )
            least = 1 if self.model.switching else 2
            found = sorted({m for m in (1, *wanted) if least <= m <= batch}, reverse=True)
            if self.narrow:
                found = self._likely(found)
            elif self.sizes:
                found = found[:: max(1, len(found) // FEW)]
            self._numbers = found
        return self._numbers

    def _likely(self, micro_batches: list[int]) -> list[int]:
        """A few numbers of micro-batches; with a guide, the quickest to fill and run."""
        model, large = self.model, len(self.model.names) >= MANY
        if self.guide is None:
            step = max(1, len(micro_batches) // (FEW // 2 if large else FEW))
            return micro_batches[step // 2 :: step]

        def guess(parts: int) -> float:
            whole = range(len(model.names))
            times = [model.options(i, parts).seconds.min(initial=0.0) for i in whole]
            return float(sum(times)) * (parts + max(model.depth) + 1)

        return sorted(sorted(micro_batches, key=guess)[: 1 if large else FEW], reverse=True)

    def slack(self) -> float:
        """Plans up to this factor above the best so far are kept."""
        if self.config.kind == "hybrid":
            return HYBRID_SLACK
        return SLACK if self.model.chain else DAG_SLACK

    def _is_root(self, task: Task) -> bool:
        return task.top and task.members == (1 << len(self.model.names)) - 1

    # Pruning by the ceiling

    def _kept(self, front: Front, task: Task) -> Front:
        """Without the rows that lead to no plan below the ceiling."""
        self.bound = max(self.bound, front.bound)
        if not np.isfinite(self.ceiling) or not len(front) or task.beside:
            return front
        rest = self.bounds.rest(task) if self.bounds is not None else 0.0
        front = front.take(np.flatnonzero(front.labels.x() <= self.ceiling - rest))
        alone = not task.takes and not task.gives
        if self.bounds is None or alone or len(front) < WORTH:
            return front
        least = self.bounds.with_neighbours(front, task)
        return front.take(np.flatnonzero(least <= self.ceiling))

    def _affordable(self, front: Front, task: Task) -> Front:
        if self.bounds is None or not np.isfinite(self.ceiling):
            return front
        front = self._kept(front, task)
        most = self._budget(task)[0]
        return front.take(np.flatnonzero(front.used[:, 0] <= most)) if len(front) else front

    def _budget(self, task: Task) -> Counts:
        """Resources the set can take beside the neighbours its pipeline needs."""
        counts = self.model.machine.counts
        if self.bounds is None or not np.isfinite(self.ceiling):
            return counts
        return counts - self.bounds.reserved(task, self.ceiling)

    def _promising(self, task: Task, cut: Cut) -> bool:
        """Both ends of the cut's edge can stay below the ceiling side by side."""
        if self.bounds is None or not np.isfinite(self.ceiling):
            return True
        left = cut.first.bit_length() - 1
        others = self.bounds.floor(task.members & ~(3 << left)) + self.bounds.rest(task)
        return self.bounds.side_by_side(left, task.parts) + others <= self.ceiling


def _quickest(front: Front, *, each: bool) -> Front:
    """The row that ends first; with ``each``, of every origin."""
    if not len(front):
        return front
    order = np.argsort(front.labels.x(), kind="stable")
    if not each:
        return front.take(order[:1])
    _, first = np.unique(front.origin[order], return_index=True)
    return front.take(order[np.sort(first)])


def _empty(shape: Labels) -> Labels:
    columns = 9 if shape.before and shape.after else 3 if shape.before or shape.after else 1
    return Labels(np.zeros((0, columns)), shape.before, shape.after, shape.parts)

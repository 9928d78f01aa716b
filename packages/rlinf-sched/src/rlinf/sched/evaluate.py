"""What a plan takes, to the micro-batch: exact for the model, dependencies included."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlinf.sched.cost import CostModel, bits
from rlinf.sched.cycle import alternating
from rlinf.sched.fit import Floats
from rlinf.sched.graph import cycle_name
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree, leaves


@dataclass(frozen=True, slots=True)
class Run:
    """When a component works.

    Attributes:
        start: of each of its micro-batches; shape (parts,).
        finish: of each; shape (parts,).
        seconds: for one of them.
    """

    start: Floats
    finish: Floats
    seconds: float


@dataclass(slots=True)
class Timeline:
    """A plan laid out in time.

    Attributes:
        runs: by component, in topological order; a cycle is one component.
        switches: (start, end, tree switched out of) of every switch.
        seconds: length of an iteration, without the workflow's ``sync_s``.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    switches: list[tuple[float, float, Tree]] = field(default_factory=list)
    seconds: float = 0.0


Stage = Callable[[str, Floats, float], Run | None]
"""Runs a component: its name, when each micro-batch is there, seconds for one; None: as usual."""


def evaluate(
    tree: Tree, model: CostModel, staleness: int = 0, stage: Stage | None = None
) -> Timeline:
    """Lay a plan out in time.

    Args:
        staleness: with 1 or more, parts side by side at the root work on different iterations,
            and the length of an iteration is that of the slowest.
        stage: replaces what the model says about a component.
    """
    line = Timeline()
    index = {name: i for i, name in enumerate(model.names)}
    if staleness and isinstance(tree, Parallel):
        parts = [evaluate(part, model, staleness - 1, stage) for part in (tree.first, tree.second)]
        for part in parts:
            line.runs |= part.runs
            line.switches += part.switches
        line.seconds = max(part.seconds for part in parts)
        return line
    line.seconds = _Clock(model, index, line, stage).run(tree, 0.0, None, 0)
    return line


@dataclass(slots=True)
class _Clock:
    model: CostModel
    index: dict[str, int]
    line: Timeline
    stage: Stage | None = None

    def run(self, tree: Tree, start: float, inherited: int | None, beside: int) -> float:
        """When the tree ends, with its devices free from ``start`` on."""
        if isinstance(tree, Leaf | Loop):
            return self._component(tree, start, inherited, beside)
        if isinstance(tree, Temporal):
            kept = (self._mask(tree.first), self._mask(tree.second)) if tree.resident else (0, 0)
            end = self.run(tree.first, start, inherited, beside | kept[1])
            if tree.switch_s:
                self.line.switches.append((end, end + tree.switch_s, tree))
            return self.run(tree.second, end + tree.switch_s, inherited, beside | kept[0])
        if isinstance(tree, Spatial):
            inherited = tree.micro_batches
        return max(
            self.run(tree.first, start, inherited, beside),
            self.run(tree.second, start, inherited, beside),
        )

    def _component(
        self, tree: Leaf | Loop, start: float, inherited: int | None, beside: int
    ) -> float:
        name, parts, seconds = self._price(tree, inherited, beside)
        ready = np.maximum(self._ready(name, parts), start)
        own = self.stage(name, ready, seconds) if self.stage is not None else None
        devices = tree.devices if isinstance(tree, Leaf) else 1
        self.line.runs[name] = own or self._usual((name, devices), ready, seconds, start)
        return float(self.line.runs[name].finish[-1])

    def _usual(self, what: tuple[str, int], ready: Floats, seconds: float, start: float) -> Run:
        (name, devices), parts = what, len(ready)
        steps = np.arange(parts)
        finish = (steps + 1) * seconds + np.maximum.accumulate(ready - steps * seconds)
        begin = finish - seconds
        entry = self.model.profile.components.get(name)
        if entry is not None and entry.uneven and parts > 1 and ready[-1] <= start:
            finish = start + seconds * parts * entry.emitted(parts, devices)
            begin = np.r_[start, finish[:-1]]
        return Run(np.asarray(begin, float), np.asarray(finish, float), seconds)

    def _price(
        self, tree: Leaf | Loop, inherited: int | None, beside: int
    ) -> tuple[str, int, float]:
        model = self.model
        if isinstance(tree, Loop):
            share = model.batch / tree.parts
            times = [model.leaf_seconds(member, share, beside) for member in tree.members]
            name = cycle_name(member.component for member in tree.members)
            if tree.parts == 1:
                return name, 1, tree.rounds * sum(times)
            return name, 1, alternating(times, tree.rounds, tree.parts)
        parts = tree.micro_batches or inherited or 1
        return tree.component, parts, model.leaf_seconds(tree, model.batch / parts, beside)

    def _ready(self, name: str, parts: int) -> Floats:
        """When the items of each micro-batch have come out of everything that feeds it."""
        ready = np.zeros(parts)
        for a in bits(self.model.pred[self.index[name]]):
            fed = self.line.runs.get(self.model.names[a])
            if fed is not None:
                count = len(fed.finish)
                last = -(-np.arange(1, parts + 1) * count // parts) - 1
                ready = np.maximum(ready, fed.finish[last])
        return ready

    def _mask(self, tree: Tree) -> int:
        members = {leaf.component for leaf in leaves(tree)}
        found = 0
        for i in range(len(self.model.names)):
            if members & set(self.model.parts_of(i)):
                found |= 1 << i
        return found

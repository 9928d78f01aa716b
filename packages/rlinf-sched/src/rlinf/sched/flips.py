"""Flips: how far one component's time may move before another layout is the best.

What a plan takes can be looked up in milliseconds, and the best plan must be searched for. So the
plans that searches have found are kept, and where one of them overtakes the present layout is found
by looking them up; a search just before that place then confirms it, or finds one that overtakes
earlier.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rlinf.sched.config import SearchConfig
from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.machine import Machine
from rlinf.sched.plan import Plan
from rlinf.sched.planner import search_model
from rlinf.sched.tree import Leaf, Loop, Tree
from rlinf.sched.workflow import Workflow

__all__ = ["Flip", "flips", "layout"]

LIMIT = 8.0
"""How many times quicker or slower a component is tried at most."""

LOOKS = 1 / 16, 1 / 4, 1.0
"""Where the best plan is searched for, as shares of the way to the limit, in octaves."""

STEP = 1 / 256
"""The same share to which a flip is known: a factor of 1.008."""


@dataclass(frozen=True, slots=True)
class Flip:
    """How far one component's time may move before another kind of plan or layout is best.

    Attributes:
        slower: factor; infinite where nothing up to eight times changes the plan.
        quicker: factor below 1; 0 where nothing down to an eighth does.
    """

    component: str
    slower: float
    quicker: float


def flips(workflow: Workflow, plan: Plan) -> Iterator[Flip]:
    """The flip of each component that has a profile, one after another."""
    plans = {layout(plan.root): [plan.root]}
    for name in workflow.profile.components:
        slower = _Way(workflow, plan, name, LIMIT, plans).flip()
        quicker = _Way(workflow, plan, name, 1 / LIMIT, plans).flip()
        yield Flip(name, slower or float("inf"), quicker or 0.0)


def layout(tree: Tree) -> str:
    """What stays of a plan when neither numbers of micro-batches nor brackets count.

    Three in turn are the same whichever two of them are taken together first; so are three side by
    side.
    """
    if isinstance(tree, Leaf):
        return f"{tree.component}@{tree.devices}{tree.device_type}"
    if isinstance(tree, Loop):
        return f"loop{tree.parts}({','.join(layout(member) for member in tree.members)})"
    return f"{type(tree).__name__}({','.join(map(layout, _members(tree, type(tree))))})"


def _members(tree: Tree, kind: type[Tree]) -> tuple[Tree, ...]:
    """What is combined in this way, in order."""
    if not isinstance(tree, kind) or isinstance(tree, Leaf | Loop):
        return (tree,)
    return _members(tree.first, kind) + _members(tree.second, kind)


@dataclass(frozen=True, slots=True)
class _Way:
    """One component's times, from what they are (0) towards `limit` times that (1)."""

    workflow: Workflow
    plan: Plan
    name: str
    limit: float
    plans: dict[str, list[Tree]]
    """Those that searches have found, by their layout."""

    def flip(self) -> float | None:
        """The factor nearest to 1 at which the layout is another; None: none up to the limit."""
        same = 0.0
        for look in LOOKS:
            if self._searched(look):
                return float(self.limit ** self._first(same, look))
            same = look
        return None

    def _first(self, same: float, other: float) -> float:
        """Where the layout becomes another, between where it is the same and where it is not."""
        while other - same > STEP:
            other = self._overtaken(same, other)
            before = max(same, other - STEP)
            if before == same or not self._searched(before):
                break
            other = before
        return other

    def _overtaken(self, same: float, other: float) -> float:
        """The same by the plans that are known: it is to a small part of a step."""
        while other - same > STEP / 8:
            middle = (same + other) / 2
            if self._is_overtaken(middle):
                other = middle
            else:
                same = middle
        return other

    def _searched(self, at: float) -> bool:
        """Look for the best plan there; whether it has another layout."""
        model = self._model(at)
        tree = search_model(model, SearchConfig(), self.workflow.staleness).root
        known = self.plans.setdefault(layout(tree), [])
        if tree not in known:
            known.append(tree)
        return self._is_overtaken(at)

    def _is_overtaken(self, at: float) -> bool:
        model, here = self._model(at), layout(self.plan.root)
        best = {
            name: min(evaluate(tree, model, self.workflow.staleness).seconds for tree in trees)
            for name, trees in self.plans.items()
        }
        return min(best.values()) < best[here] * (1 - 1e-9)

    def _model(self, at: float) -> CostModel:
        profile = self.workflow.profile.scaled({self.name: self.limit**at})
        machine = Machine.of(self.workflow.devices, profile)
        return CostModel(self.workflow.graph, profile, machine, self.workflow.batch)

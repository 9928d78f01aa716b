"""Improving plans of workflows that are no chain, by laying their neighbours out in time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree

STARTS = 3
STEPS = 12


def polish(plans: Sequence[Tree], model: CostModel) -> tuple[float, Tree]:
    """The best plan found from the given ones, and its seconds."""
    timed = [(evaluate(plan, model).seconds, k, plan) for k, plan in enumerate(plans)]
    seconds, _, tree = min(timed)
    return seconds, tree

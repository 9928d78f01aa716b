"""Cutting a convex set of a workflow in two."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlinf.sched.cost import CostModel, bits


@dataclass(frozen=True, slots=True)
class Cut:
    """A convex set in two: nothing of ``second`` feeds ``first``."""

    first: int
    second: int
    edge: bool


def all_cuts(model: CostModel, members: int) -> Iterator[Cut]:
    """Every down-set of the set against the rest."""
    inside = sorted(bits(members), key=lambda i: (model.anc[i] & members).bit_count())
    found = [0]
    for i in inside:
        needed = model.anc[i] & members
        found += [s | 1 << i for s in found if s & needed == needed]
    for first in found:
        if first and first != members:
            yield _cut(model, first, members & ~first)


def along_depth(model: CostModel, members: int) -> Iterator[Cut]:
    """Only the beginnings of one topological order, by depth."""
    first = 0
    for i in sorted(bits(members), key=lambda i: (model.depth[i], i))[:-1]:
        first |= 1 << i
        yield _cut(model, first, members & ~first)


def _cut(model: CostModel, first: int, second: int) -> Cut:
    return Cut(first, second, any(model.succ[i] & second for i in bits(first)))

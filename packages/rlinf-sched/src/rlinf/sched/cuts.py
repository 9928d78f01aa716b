"""What a search is asked for a convex set of a workflow, and how such a set is cut in two."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlinf.sched.compose import Wiring
from rlinf.sched.cost import CostModel, bits

TWO_ORDERS = 6


@dataclass(frozen=True, slots=True)
class Cut:
    """A convex set in two: nothing of ``second`` feeds ``first``."""

    first: int
    second: int
    edge: bool


@dataclass(frozen=True, slots=True)
class Task:
    """A set of components, and those outside that its pipeline touches (bit masks).

    Attributes:
        takes: members fed by a pipelined neighbour.
        gives: members that feed one.
        parts: micro-batches of the segment.
        beside: components idle in the memory of the same devices.
        top: all resources are its own, and only its quickest plan matters.
    """

    members: int
    takes: int = 0
    gives: int = 0
    parts: int = 1
    beside: int = 0
    top: bool = False

    def part(self, members: int, fed: int, feeding: int) -> "Task":
        """A part of the set, with further neighbours within the set."""
        takes = (self.takes | fed) & members
        gives = (self.gives | feeding) & members
        return Task(members, takes, gives, self.parts, self.beside)


def wiring(task: Task, cut: Cut, edge: bool) -> Wiring:
    """Which sides of a cut have pipelined neighbours outside the set."""
    return Wiring(
        edge,
        bool(task.takes & cut.first),
        bool(task.takes & cut.second),
        bool(task.gives & cut.first),
        bool(task.gives & cut.second),
    )


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


def few_cuts(model: CostModel, members: int) -> Iterator[Cut]:
    """The beginnings of a topological order, and each unconnected piece against the rest.

    The order is by the longest way from the start; up to TWO_ORDERS components also by the
    longest way to the end.
    """
    seen = {0, members}
    inside = bits(members)
    orders = [sorted(inside, key=lambda i: (model.depth[i], i))]
    if len(model.names) <= TWO_ORDERS:
        orders.append(sorted(inside, key=lambda i: (-model.height[i], i)))
    for order in orders:
        first = 0
        for i in order:
            first |= 1 << i
            if first not in seen:
                seen.add(first)
                yield _cut(model, first, members & ~first)
    for piece in _pieces(model, members):
        if piece not in seen:
            seen.add(piece)
            yield _cut(model, piece, members & ~piece)


def _pieces(model: CostModel, members: int) -> Iterator[int]:
    left = members
    while left:
        piece, grown = 0, left & -left
        while grown != piece:
            piece = grown
            for i in bits(piece):
                grown |= (model.succ[i] | model.pred[i]) & members
        yield piece
        left &= ~piece


def _cut(model: CostModel, first: int, second: int) -> Cut:
    return Cut(first, second, any(model.succ[i] & second for i in bits(first)))

"""Two components in turn beside two others in turn, each of the first two feeding the second ones.

The label of a set has one entry for all its departures, so a consumer of the first component would
be priced as if it waited for the second one too. Here every component keeps its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rlinf.sched import compose
from rlinf.sched.algebra import Floats, Labels, Pair, so_ie
from rlinf.sched.compose import Wiring
from rlinf.sched.cost import CostModel, bits
from rlinf.sched.cuts import Cut
from rlinf.sched.front import Front, Origin
from rlinf.sched.machine import Counts
from rlinf.sched.pairing import in_turn, side_by_side

Order = tuple[int, int]
"""Two components, the first of which runs first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Two fronts in turn on the same devices.

    Attributes:
        front: the plans of both.
        first: labels of the first component; rows as the front's.
        second: of the second one, as if it began at 0.
        start: when the second one begins, with everything there.
        switch_s: seconds between them.
    """

    order: Order
    front: Front
    first: Labels
    second: Labels
    start: Floats
    switch_s: float


def crossed(
    model: CostModel, cut: Cut, single: Callable[[int, bool], Front], budget: Counts
) -> Iterator[Front]:
    """The fronts of all orders of both pairs; none where the cut does not part two such pairs.

    Args:
        single: the front of a component that feeds the second pair, or is fed by the first.
    """
    first, second = bits(cut.first), bits(cut.second)
    if len(first) != 2 or len(second) != 2:
        return
    if not all(model.succ[i] & cut.second for i in first):
        return
    if not all(model.pred[i] & cut.first for i in second):
        return
    for one in _orders(model, first):
        for other in _orders(model, second):
            before = _turn(model, one, [single(i, True) for i in one])
            after = _turn(model, other, [single(i, False) for i in other])
            yield _beside(model, before, after, budget)


def _orders(model: CostModel, pair: list[int]) -> Iterator[Order]:
    a, b = pair
    if not model.anc[a] >> b & 1:
        yield a, b
    if not model.anc[b] >> a & 1:
        yield b, a


def _turn(model: CostModel, order: Order, fronts: list[Front]) -> Turn:
    first, second = fronts
    switch_s = model.switch(1 << order[0], 1 << order[1])
    rows = in_turn(first, second)
    one, other = first.labels.take(rows[0]).affine(), second.labels.take(rows[1]).affine()
    parts = one.parts
    wires = Wiring(False, one.before, other.before, one.after, other.after)
    labels = compose.temporal(parts, one, other, wires, switch_s)
    origin = Origin("temporal", first, second, parts, switch_s=switch_s)
    front = compose.front_of(origin, rows, labels)
    return Turn(order, front, one, other, one.x() + switch_s, switch_s)


def _beside(model: CostModel, before: Turn, after: Turn, budget: Counts) -> Front:
    rows = side_by_side(before.front, after.front, budget, last=False)
    i, j, _ = rows
    parts = before.front.labels.parts
    late = before.start[i]
    producers = zip(
        before.order,
        (_departures(before.first, i, np.zeros(len(i))), _departures(before.second, i, late)),
        strict=True,
    )
    out = dict(producers)

    def end(consumer: int, labels: Labels, start: Floats) -> Floats:
        found = start + labels.x()
        for producer, departures in out.items():
            if model.succ[producer] >> consumer & 1:
                found = np.maximum(found, so_ie(parts, _emitting(parts, departures), labels))
        return np.asarray(found)

    c, d = after.order
    middle = end(c, after.first.take(j), np.zeros(len(j))) + after.switch_s
    last = np.maximum(end(d, after.second.take(j), middle), late + before.second.x()[i])
    origin = Origin("spatial", before.front, after.front, parts)
    return compose.front_of(origin, rows, Labels(last[:, None], False, False, parts))


def _departures(labels: Labels, rows: Counts, late: Floats) -> Pair:
    first, period = labels.so()
    return first[rows] + late, period[rows]


def _emitting(parts: int, departures: Pair) -> Labels:
    values = np.stack([*departures, np.zeros_like(departures[0])], axis=1)
    return Labels(values, False, True, parts)

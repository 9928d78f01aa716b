"""Composing two fronts: side by side, in turn, or independent."""

from dataclasses import dataclass

import numpy as np

from rlinf.sched import algebra
from rlinf.sched.algebra import Flow, Labels, Pair
from rlinf.sched.front import Front, Origin
from rlinf.sched.machine import Counts


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which sides of two parts have pipelined neighbours.

    Attributes:
        edge: the first feeds the second.
        before_first: a neighbour feeds the first part; and so on.
    """

    edge: bool = False
    before_first: bool = False
    before_second: bool = False
    after_first: bool = False
    after_second: bool = False

    @property
    def before(self) -> bool:
        """A neighbour feeds either part."""
        return self.before_first or self.before_second

    @property
    def after(self) -> bool:
        """Either part feeds a neighbour."""
        return self.after_first or self.after_second


def spatial(parts: int, first: Labels, second: Labels, wires: Wiring) -> Labels:
    """Two parts on separate devices; rows correspond."""
    if not wires.before and not wires.after:
        return _closed(parts, first, second, wires)
    if first.curve is not None and (wires.after or second.curve is not None):
        first = first.affine()
    second = second.affine()
    end = np.maximum(first.x(), second.x())
    if wires.edge:
        end = np.maximum(end, algebra.so_ie(parts, first, second))
    out: Pair | None = first.so() if wires.after_first else None
    if wires.after_second:
        out = algebra.both(parts, out, second.so())
        if wires.edge:
            out = algebra.both(parts, out, algebra.so_io(parts, first.so(), second.io()))
    taken: Pair | None = first.ie() if wires.before_first else None
    if wires.before_first and wires.edge:
        taken = algebra.both(parts, taken, algebra.io_ie(parts, first.io(), second.ie()))
    if wires.before_second:
        taken = algebra.both(parts, taken, second.ie())
    return algebra.assemble(parts, end, out, taken, _flow(parts, first, second, wires))


def _closed(parts: int, first: Labels, second: Labels, wires: Wiring) -> Labels:
    second = second.affine()
    end = np.maximum(first.x(), second.x())
    if wires.edge:
        end = np.maximum(end, algebra.so_ie(parts, first, second))
    return Labels(end[:, None], False, False, parts)


def _flow(parts: int, first: Labels, second: Labels, wires: Wiring) -> Flow | None:
    flow: Flow | None = None
    if wires.before_first and wires.after_first:
        flow = first.io()
    if wires.before_first and wires.edge and wires.after_second:
        flow = algebra.both_flows(flow, algebra.io_io(parts, first.io(), second.io()))
    if wires.before_second and wires.after_second:
        flow = algebra.both_flows(flow, second.io())
    return flow


def temporal(parts: int, first: Labels, second: Labels, wires: Wiring, switch_s: float) -> Labels:
    """The second part after the first on the same devices; rows correspond."""
    first = first.affine()
    start = first.x() + switch_s
    if not wires.before and not wires.after:
        return Labels((start + second.x())[:, None], False, False, parts)
    if second.curve is not None and not wires.before and not wires.after_first:
        return _delayed_source(second, start)
    second = second.affine()
    second_end = second.x()
    out = first.so() if wires.after_first else None
    taken = second.ie() if wires.before_second else None
    flow = second.io() if wires.before_second and wires.after_second else None
    if wires.after_second:
        a, e = second.so()
        out = algebra.both(parts, out, (start + a, e))
    if wires.before_first:
        a, c = first.ie()
        taken = algebra.both(parts, taken, (a + switch_s + second_end, c))
        if wires.after_second:
            a2, e2 = second.so()
            flow = algebra.both_flows(flow, (a + switch_s + a2, c, e2, np.ones_like(a)))
    if wires.before_first and wires.after_first:
        flow = algebra.both_flows(flow, first.io())
    return algebra.assemble(parts, start + second_end, out, taken, flow)


def _delayed_source(second: Labels, start: algebra.Floats) -> Labels:
    values = second.values.copy()
    values[:, 0] += start
    values[:, 2] = np.where(values[:, 2] > 0, values[:, 2] + start, 0.0)
    return Labels(values, second.before, second.after, second.parts, second.curve)


def front_of(origin: Origin, rows: tuple[Counts, Counts, Counts], labels: Labels) -> Front:
    """A front of composed rows."""
    i, j, used = rows
    bound = sum(part.bound for part in (origin.first, origin.second) if part is not None)
    return Front(used, labels, (origin,), np.zeros(len(i), np.int64), i, j, bound=bound)

"""How parts of a plan compose: what a sub-plan does to the micro-batches that pass through it.

Within a segment of M micro-batches, arrivals and departures are (A, R): the first at A, then one
every R seconds. A sub-plan answers an arrival (a, r) with up to four things:

=========  ==================================================================================
io         departures caused by arrivals. Stream: first at a + A, then every max(r, R).
           Block: first at a + A + (M-1) max(r, c), then every e.
so         departures it would make if everything had arrived at the start: (A, e)
ie         its end, caused by arrivals: a + A + (M-1) max(r, c)
x          its end if everything had arrived at the start: the shadow tail lives here
=========  ==================================================================================

A set of components without a pipelined neighbour on a side lacks the entries of that side. Where
two departures meet, even departures between the later of the two first and the later of the two
last ones stand for both; where two flows meet, (max A, max R) does. Neither prices a plan too low.
A leaf with time f is the stream (f, f). Redundant entries are 0; an absent io has A = ABSENT.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Pair = tuple[Floats, Floats]
Flow = tuple[Floats, Floats, Floats, Floats]

ABSENT = -1e18
ROUND = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of sub-plans, one a row, columns as the ports ask.

    Columns: no ports ``x``; after ``A e x``; before ``A c x``; both
    ``A c e k  Ao eo  Ai ci  x`` with k = 0 for a stream and 1 for a block.

    Attributes:
        curve: fractions of the run after which portions leave, where the last component before
            the port does not emit evenly; then column e holds the length of its run and column
            A the time before it starts. Shape (rows, M).
    """

    values: Floats
    before: bool
    after: bool
    parts: int
    curve: Floats | None = None

    def take(self, rows: npt.NDArray[np.int64]) -> "Labels":
        """Only these rows."""
        curve = None if self.curve is None else self.curve[rows]
        return Labels(self.values[rows], self.before, self.after, self.parts, curve)

    def so(self) -> Pair:
        """First departure and period, with everything there at the start."""
        v = self.values
        if not self.before:
            return v[:, 0], v[:, 1]
        first = v[:, 0] + v[:, 3] * (self.parts - 1) * v[:, 1]
        return later(self.parts, (first, v[:, 2]), (v[:, 4], v[:, 5]))

    def ie(self) -> Pair:
        """Time after the last arrival, and the period it can take arrivals at."""
        v = self.values
        if not self.after:
            return v[:, 0], v[:, 1]
        last = v[:, 0] + v[:, 3] * (self.parts - 1) * v[:, 2]
        return later(self.parts, (last, v[:, 1]), (v[:, 6], v[:, 7]))

    def io(self) -> Flow:
        """First departure, consuming period, emitting period, block or stream."""
        v = self.values
        return v[:, 0], v[:, 1], v[:, 2], v[:, 3]

    def x(self) -> Floats:
        """End, with everything there at the start."""
        v = self.values
        if not self.before and not self.after:
            return v[:, 0]
        end = v[:, -1]
        if self.curve is not None:
            return np.maximum(end, v[:, 0] + v[:, 1])
        if self.after:
            first, period = self.so()
            end = np.maximum(end, first + (self.parts - 1) * period)
        if self.before:
            first, period = self.ie()
            end = np.maximum(end, first + (self.parts - 1) * period)
        return end

    def affine(self) -> "Labels":
        """The same with even departures that are never earlier."""
        if self.curve is None:
            return self
        v = self.values.copy()
        run = v[:, 1]
        steps = np.arange(self.parts)
        period = run / self.parts
        lead = (run[:, None] * self.curve - period[:, None] * steps).max(axis=1)
        v[:, 2] = np.maximum(v[:, 2], v[:, 0] + run)
        v[:, 0] += lead
        v[:, 1] = period
        return Labels(v, self.before, self.after, self.parts)


def leaf(seconds: Floats, before: bool, after: bool, parts: int) -> Labels:
    """Labels of one component that takes these seconds for each micro-batch."""
    zero = np.zeros_like(seconds)
    if before and after:
        columns = [seconds, seconds, seconds, zero, zero, zero, zero, zero, zero]
    elif before or after:
        columns = [seconds, seconds, zero]
    else:
        columns = [seconds * parts]
    return Labels(np.stack(columns, axis=1), before, after, parts)


def source(run: Floats, curve: Floats, parts: int) -> Labels:
    """Labels of a component without pipelined input that emits along its row of ``curve``."""
    zero = np.zeros_like(run)
    return Labels(np.stack([zero, run, zero], axis=1), False, True, parts, curve)


def whole(seconds: Floats, before: bool, after: bool, parts: int) -> Labels:
    """Labels of a sub-plan that waits for the whole batch and gives the whole batch away."""
    zero = np.zeros_like(seconds)
    if before and after:
        one = np.ones_like(seconds)
        columns = [seconds, zero, zero, one, zero, zero, zero, zero, zero]
    elif before or after:
        columns = [seconds, zero, zero]
    else:
        columns = [seconds]
    return Labels(np.stack(columns, axis=1), before, after, parts)


def so_ie(parts: int, first: Labels, second: Labels) -> Floats:
    """End of ``second`` fed by ``first``, from the start."""
    a2, c2 = second.ie()
    if first.curve is not None:
        ahead = parts - 1 - np.arange(parts)
        run = first.values[:, 1]
        late = run * first.curve[:, 0] + ahead[0] * c2
        for k in _all_corners(first.curve):
            np.maximum(late, run * first.curve[:, k] + ahead[k] * c2, out=late)
        return np.asarray(first.values[:, 0] + late + a2)
    a1, e1 = first.so()
    return np.asarray(a1 + a2 + (parts - 1) * np.maximum(e1, c2))


def so_io(parts: int, first: Pair, flow: Flow) -> Pair:
    """Departures of a sub-plan fed by departures from the start."""
    (a1, e1), (a2, c2, e2, k2) = first, flow
    rate = np.maximum(e1, c2)
    return a1 + a2 + k2 * (parts - 1) * rate, np.where(k2 > 0, e2, rate)


def io_ie(parts: int, flow: Flow, end: Pair) -> Pair:
    """End of a sub-plan fed by a flow."""
    (a1, c1, e1, k1), (a2, c2) = flow, end
    rate = np.maximum(e1, c2)
    return a1 + a2 + k1 * (parts - 1) * rate, np.where(k1 > 0, c1, np.maximum(c1, c2))


def io_io(parts: int, first: Flow, second: Flow) -> Flow:
    """One flow after another."""
    (a1, c1, e1, k1), (a2, c2, e2, k2) = first, second
    rate = np.maximum(e1, c2)
    wait = k1 * k2 * (parts - 1) * rate
    consume = np.where(k1 > 0, c1, np.maximum(c1, c2))
    emit = np.where(k2 > 0, e2, rate)
    return a1 + a2 + wait, consume, emit, np.maximum(k1, k2)


def both(parts: int, one: Pair | None, other: Pair | None) -> Pair | None:
    """Wait for two departures, or ends."""
    if one is None or other is None:
        return one or other
    return later(parts, one, other)


def later(parts: int, one: Pair, other: Pair) -> Pair:
    """The later of two departures, made even; of two ends exactly the later one."""
    (a1, r1), (a2, r2) = one, other
    if parts == 1:
        return np.maximum(a1, a2), np.maximum(r1, r2)
    steps = parts - 1
    ahead, behind = a1 - a2, (a1 - a2) + steps * (r1 - r2)
    apart = np.where(ahead > 0, r2 - ahead / steps, r1 + ahead / steps)
    mixed = ahead * behind < 0
    rate = np.where(mixed, apart, np.where((ahead > 0) | (behind > 0), r1, r2))
    return np.maximum(a1, a2), rate


def both_flows(one: Flow | None, other: Flow | None) -> Flow | None:
    """Wait for two flows."""
    if one is None or other is None:
        return one or other
    a, c, e, k = (np.maximum(p, q) for p, q in zip(one, other, strict=True))
    return a, c, e, k


def assemble(
    parts: int, end: Floats, out: Pair | None, taken: Pair | None, flow: Flow | None
) -> Labels:
    """Labels from their entries, with what is redundant set to 0."""
    if out is None and taken is None:
        return Labels(end[:, None], False, False, parts)
    if out is None or taken is None:
        pair = out or taken
        assert pair is not None
        implied = pair[0] + (parts - 1) * pair[1]
        tail = np.where(end > implied * ROUND, end, 0.0)
        return Labels(np.stack([*pair, tail], axis=1), out is None, taken is None, parts)
    if flow is None:
        zero = np.zeros_like(end)
        flow = (np.full_like(end, ABSENT), zero, zero, zero)
    bare = Labels(np.stack([*flow, *(np.zeros((5, len(end))))], axis=1), True, True, parts)
    extra = []
    for pair, implied_pair in ((out, bare.so()), (taken, bare.ie())):
        more = (pair[0] > implied_pair[0] * ROUND) | (pair[1] > implied_pair[1] * ROUND)
        extra += [np.where(more, pair[0], 0.0), np.where(more, pair[1], 0.0)]
    bare.values[:, 4:8] = np.stack(extra, axis=1)
    bare.values[:, 8] = np.where(end > bare.x() * ROUND, end, 0.0)
    return bare


def _all_corners(curves: Floats) -> list[int]:
    if not len(curves):
        return []
    fresh = np.r_[True, (curves[1:] != curves[:-1]).any(axis=1)]
    different = np.unique(curves[fresh], axis=0)
    return sorted({int(k) for curve in different for k in _corners(curve)})


def _corners(curve: Floats) -> npt.NDArray[np.int64]:
    """Indexes of the upper hull of an emission curve: the others never decide."""
    hull: list[int] = []
    for k in range(len(curve)):
        while len(hull) > 1:
            i, j = hull[-2], hull[-1]
            if (curve[j] - curve[i]) * (k - j) > (curve[k] - curve[j]) * (j - i):
                break
            hull.pop()
        hull.append(k)
    return np.array(hull, np.int64)

"""Labels of the sets of a trial: keeping them, and keeping few of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlinf.sched.machine import Counts

Ticks = npt.NDArray[np.int16]

NEVER = -16000
"""Ticks of a way that does not exist: with any label it stays negative, without overflow."""

LATE = 1 << 20
"""Ticks of an end that is beyond the limit."""

BLOCK = 32
"""Labels compared at once with all others."""

AT_ONCE = 8
"""After so many numbers, labels which none of the block may stand for are left out."""

SMALL = 1 << 17
"""Up to so many numbers are compared in one go."""

LATER = ~np.tri(BLOCK, dtype=np.bool_)
"""Whether a point of a block comes before another."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Labels of one set, by use of devices.

    Attributes:
        base: where the labels begin in the pool.
        used: units of devices; shape (rows,).
        ends: ticks until the end; shape (rows,).
        back: what the row was made of; shape (rows, 3).
        until: how many rows use less than 0, 1, ... units; shape (units + 2,).
    """

    base: int
    used: Counts
    ends: Counts
    back: Counts
    until: Counts

    def least(self) -> Counts:
        """Least ticks until the end on 0, 1, ... units; shape (units + 1,)."""
        found = np.full(len(self.until) - 1, LATE)
        np.minimum.at(found, self.used, self.ends)
        return np.minimum.accumulate(found)


@dataclass(slots=True)
class Pool:
    """All labels of a trial, one after another; the first entry is NEVER."""

    ticks: Ticks = field(default_factory=lambda: np.full(1 << 16, NEVER, np.int16))
    _end: int = 1

    def add(self, units: int, used: Counts, labels: Ticks, back: Counts) -> Rows:
        """Keep these labels; ``units``: of devices there are."""
        order = np.argsort(used, kind="stable")
        base, self._end = self._end, self._end + labels.size
        while self._end > len(self.ticks):
            self.ticks = np.concatenate([self.ticks, self.ticks])
        self.ticks[base : self._end] = labels[order].ravel()
        until = np.r_[0, np.cumsum(np.bincount(used, minlength=units + 1))]
        return Rows(base, used[order], labels[order, 0].astype(np.int64), back[order], until)


def cover(
    used: Counts, labels: Ticks, alike: int, spend: Callable[[int], None]
) -> tuple[Counts, Ticks]:
    """Few labels, at least one of which is as good as each of all those.

    A label goes where another one on no more devices is in nothing later by more than ``alike``
    ticks. The other is then lowered to the lesser of both in everything.

    Args:
        spend: told how many numbers are compared; what it raises ends the search.

    Returns:
        the rows that stay, and their labels.
    """
    order = np.argsort(np.maximum(labels, 0).sum(axis=1, dtype=np.int64), kind="stable")
    columns = np.concatenate([used[order][None].astype(np.int16), labels[order].T])
    lowered = columns[1:]
    rows, least = [order[:0]], [lowered[:, :0]]
    while len(order):
        top = min(BLOCK, len(order))
        spend(top * columns.size)
        by = _replaced(columns, top, alike)
        at, staying = np.argsort(by, kind="stable"), int(np.count_nonzero(by < 0))
        stay, gone = at[:staying], at[staying:]
        if len(gone):
            heirs = by[gone]
            (starts,) = np.concatenate([heirs[:1] >= 0, heirs[1:] != heirs[:-1]]).nonzero()
            heirs = heirs[starts]
            lower = np.minimum.reduceat(lowered.take(gone, axis=1), starts, axis=1)
            lowered[:, heirs] = np.minimum(lowered[:, heirs], lower)
        done = int(stay.searchsorted(top))
        rows.append(order[stay[:done]])
        least.append(lowered.take(stay[:done], axis=1))
        stay = stay[done:]
        order, columns = order[stay], columns.take(stay, axis=1)
        lowered = lowered.take(stay, axis=1)
    return np.concatenate(rows), np.ascontiguousarray(np.concatenate(least, axis=1).T)


def _replaced(columns: Ticks, top: int, alike: int) -> Counts:
    """Which of the first ``top`` points stands for each of all points, or -1.

    Of the first ones only such stand for others for which none stands, so that nothing is lowered
    twice. Shape (dimensions, points); the first dimension allows for no tolerance.
    """
    first, rest = columns[1:, :top], columns[1:] + np.int16(alike)
    beats, which = columns[0, :top, None] <= columns[0], np.arange(columns.shape[1])
    step = AT_ONCE if top * columns.size > SMALL else len(first)
    for low in range(0, len(first), step):
        _compare(first[low : low + step], rest[low : low + step], beats)
        if step < len(first):
            # A point is within reach of itself: the first ones all stay, and stay first.
            some = np.flatnonzero(beats.any(axis=0))
            beats, rest, which = beats[:, some], rest.take(some, axis=1), which[some]
    beats[:, :top] &= LATER[:top, :top]
    free = ~beats[:, :top].any(axis=0)
    beats[~free, :top] = False
    beats[beats[:, :top].any(axis=0)] = False
    found = np.full(columns.shape[1], -1)
    found[which] = np.where(beats.any(axis=0), beats.argmax(axis=0), -1)
    return found


def _compare(first: Ticks, rest: Ticks, beats: npt.NDArray[np.bool_]) -> None:
    """Leave in ``beats`` only the pairs of which the first is at most the other in everything."""
    if len(first) * beats.size <= SMALL:
        beats &= (first[:, :, None] <= rest[:, None, :]).all(axis=0)
        return
    better = np.empty_like(beats)
    for one, other in zip(first, rest, strict=True):
        np.less_equal(one[:, None], other, out=better)
        beats &= better

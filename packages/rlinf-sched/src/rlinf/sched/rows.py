"""Labels of the sets of a trial: keeping them, and keeping few of them."""

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


def cover(used: Counts, labels: Ticks, alike: int) -> tuple[Counts, Ticks, int]:
    """Few labels, at least one of which is as good as each of all those.

    A label goes where another one on no more devices is in nothing later by more than ``alike``
    ticks. The other is then lowered to the lesser of both in everything.

    Returns:
        the rows that stay, their labels, and how many numbers were compared.
    """
    order = np.argsort(np.maximum(labels, 0).sum(axis=1, dtype=np.int64), kind="stable")
    columns = np.concatenate([used[order][None].astype(np.int16), labels[order].T])
    lowered, at, compared = columns[1:].copy(), 0, 0
    while at < columns.shape[1]:
        top, rest = columns[:, at : at + BLOCK], columns[:, at:]
        compared += top.shape[1] * rest.size
        by = _replaced(top, rest, alike)
        gone = np.flatnonzero(by >= 0)
        if len(gone):
            gone = gone[np.argsort(by[gone], kind="stable")]
            heirs, starts = np.unique(by[gone], return_index=True)
            least = np.minimum.reduceat(lowered[:, at + gone], starts, axis=1)
            lowered[:, at + heirs] = np.minimum(lowered[:, at + heirs], least)
        stay = np.r_[np.arange(at), at + np.flatnonzero(by < 0)]
        at += int((by[: top.shape[1]] < 0).sum())
        columns, lowered, order = columns[:, stay], lowered[:, stay], order[stay]
    return order, np.ascontiguousarray(lowered.T), compared


def _replaced(top: Ticks, rest: Ticks, alike: int) -> Counts:
    """Which of the points ``top`` stands for each of ``rest``, which begins with them, or -1.

    Within ``top`` only such points stand for others for which none stands, so that nothing is
    lowered twice. Shapes (dimensions, points); the first dimension allows for no tolerance.
    """
    count, found = top.shape[1], np.full(rest.shape[1], -1)
    beats, which = top[0][:, None] <= rest[0], np.arange(len(found))
    top, rest = top[1:], rest[1:] + np.int16(alike)
    for low in range(0, len(top), AT_ONCE):
        better = np.empty_like(beats)
        for one, other in zip(top[low:][:AT_ONCE], rest[low:][:AT_ONCE], strict=True):
            np.less_equal(one[:, None], other, out=better)
            beats &= better
        # A point is within reach of itself: those of top all stay, and stay first.
        some = np.flatnonzero(beats.any(axis=0))
        beats, rest, which = beats[:, some], rest[:, some], which[some]
    beats[:, :count] &= ~np.tri(count, dtype=bool)
    first = ~beats[:, :count].any(axis=0)
    beats[~first, :count] = False
    beats[beats[:, :count].any(axis=0)] = False
    found[which] = np.where(beats.any(axis=0), beats.argmax(axis=0), -1)
    return found

"""Labels of the sets of a trial: keeping them, and keeping few of them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlinf.sched.machine import Counts

Ticks = npt.NDArray[np.int16]

NEVER = -16000
"""Ticks of a way that does not exist: with any label it stays negative, without overflow."""

BLOCK = 96
"""Labels compared at once with all others."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Labels of one set; by number of micro-batches, then by use of devices.

    Attributes:
        base: where the labels begin in the pool.
        number: which number of micro-batches; 0: every component has the whole batch; (rows,).
        used: units of devices; shape (rows,).
        ends: ticks until the end; shape (rows,).
        back: what the row was made of; shape (rows, 3).
        until: rows before those with a number and at least so many units; (numbers, units + 2).
    """

    base: int
    number: Counts
    used: Counts
    ends: Counts
    back: Counts
    until: Counts


@dataclass(slots=True)
class Pool:
    """All labels of a trial, one after another; the first entry is NEVER."""

    ticks: Ticks = field(default_factory=lambda: np.full(1 << 16, NEVER, np.int16))
    _end: int = 1

    def add(
        self, shape: tuple[int, int], number: Counts, used: Counts, labels: Ticks, back: Counts
    ) -> Rows:
        """Keep these labels; ``shape``: how many numbers of micro-batches, and units, there are."""
        order = np.lexsort((used, number))
        base, self._end = self._end, self._end + labels.size
        while self._end > len(self.ticks):
            self.ticks = np.concatenate([self.ticks, self.ticks])
        self.ticks[base : self._end] = labels[order].ravel()
        numbers, units = shape
        cells = np.bincount(number * (units + 2) + used + 1, minlength=numbers * (units + 2))
        until = np.cumsum(cells).reshape(numbers, units + 2)
        ends = labels[order, 0].astype(np.int64)
        return Rows(base, number[order], used[order], ends, back[order], until)


def skyline(number: Counts, used: Counts, labels: Ticks) -> tuple[Counts, int]:
    """Rows that no other with the same number is at least as good as in everything.

    Returns:
        the rows, and how many numbers were compared.
    """
    order = np.lexsort((np.maximum(labels, 0).sum(axis=1, dtype=np.int64), number))
    columns = np.concatenate([used[order][None].astype(np.int16), labels[order].T])
    starts = np.flatnonzero(np.r_[True, np.diff(number[order]) > 0])
    kept, work = [], 0
    for low, high in zip(starts, [*starts[1:], len(order)], strict=True):
        alive = _undominated(columns[:, low:high])
        work += (high - low) * len(alive) * len(columns)
        kept.append(order[low + alive])
    return np.concatenate(kept), work


def _undominated(columns: Ticks) -> Counts:
    """Points none before is at most equal to everywhere; shape (dimensions, points)."""
    alive, at = np.arange(columns.shape[1]), 0
    while at < len(alive):
        top, rest = columns[:, at : at + BLOCK], columns[:, at:]
        beats = top[0][:, None] <= rest[0]
        better = np.empty_like(beats)
        for one, other in zip(top[1:], rest[1:], strict=True):
            np.less_equal(one[:, None], other, out=better)
            beats &= better
        count = top.shape[1]
        beats[:, :count] &= ~np.tri(count, dtype=bool)
        keep = ~beats.any(axis=0)
        columns = np.concatenate([columns[:, :at], rest[:, keep]], axis=1)
        alive = np.concatenate([alive[:at], alive[at:][keep]])
        at += int(keep[:count].sum())
    return alive


def merged(
    number: Counts, used: Counts, labels: Ticks, back: Counts, most: int
) -> tuple[Counts, Counts, Ticks, Counts]:
    """About ``most`` rows: of those with like ends on as many devices, the least of everything.

    ``back`` is that of the row which ends first.
    """
    order = np.lexsort((labels[:, 0], used, number))
    number, used, labels, back = number[order], used[order], labels[order], back[order]
    fresh = np.r_[True, (np.diff(number) != 0) | (np.diff(used) != 0)]
    group = np.cumsum(fresh) - 1
    size = np.bincount(group)[group]
    rank = np.arange(len(group)) - np.flatnonzero(fresh)[group]
    part = rank * np.maximum(1, size * most // len(group)) // size
    starts = np.flatnonzero(fresh | np.r_[True, np.diff(part) != 0])
    return number[starts], used[starts], np.minimum.reduceat(labels, starts, axis=0), back[starts]

"""Composing labels: the longest ways through two parts of a pipeline, see :mod:`rlinf.sched.trial`.

The labels of many pairs are composed at once, over all cuts of a set. As these differ in which
components stand on either side, rows and columns are looked up, and those which a part lacks are
the pool's first entry, NEVER.
"""

from collections.abc import Sequence

import numpy as np

from rlinf.sched.layout import NONE, Layout
from rlinf.sched.machine import Counts
from rlinf.sched.rows import NEVER, Ticks


class Joint:
    """How labels of the parts of a set become labels of the set, for each of its cuts.

    Attributes:
        cuts: the numbers of both parts; shape (cuts, 2).
        edge: the first part feeds the second; shape (cuts,).
        sizes: entries in a label of either part; shapes (cuts,).
    """

    def __init__(self, layout: Layout, k: int, cuts: Counts) -> None:
        self.cuts = cuts
        first, second = cuts[:, 0], cuts[:, 1]
        self._out = layout.column[first][:, layout.edges[:, 0]]
        self._into = layout.row[second][:, layout.edges[:, 1]]
        self._crossing = (self._out >= 0) & (self._into >= 0)
        self.edge = self._crossing.any(axis=1)
        widths = 1 + 2 * (layout.column >= 0).sum(axis=1)
        heights = 1 + 2 * (layout.row >= 0).sum(axis=1)
        self._width = widths[first], widths[second]
        self.sizes = widths[first] * heights[first], widths[second] * heights[second]
        self._rows = [_ported(layout.row[part][:, layout.fed[k]]) for part in (first, second)]
        self._columns = [
            _ported(layout.column[part][:, layout.feeding[k]]) for part in (first, second)
        ]

    def in_turn(self) -> Sequence[tuple[Counts, Counts]]:
        """(column of the first part, row of the second) that follow one another."""
        start = np.zeros(len(self.cuts), np.int64)
        return [(start, start)]

    def beside(self) -> Sequence[tuple[Counts, Counts]]:
        """The same for parts side by side: departures and arrivals of every edge between them."""
        order = np.argsort(~self._crossing, axis=1, kind="stable")
        found = []
        for e in range(int(self._crossing.sum(axis=1).max(initial=0))):
            at = np.arange(len(order)), order[:, e]
            crossing = self._crossing[at]
            for k in (1, 2):
                column = np.where(crossing, k + 2 * self._out[at], NONE)
                found.append((column, np.where(crossing, k + 2 * self._into[at], NONE)))
        return found

    def waits(
        self, ticks: Ticks, cut: Counts, offsets: tuple[Counts, Counts],
        links: Sequence[tuple[Counts, Counts]],
    ) -> Ticks:  # fmt: skip
        """Least ticks until the end of the second part, waiting for the first; shape (pairs,)."""
        (one, other), width = offsets, self._width[1]
        found = np.full(len(cut), NEVER, np.int16)
        for column, row in links:
            c, r = column[cut], row[cut]
            ways = ticks[np.where(c >= 0, one + c, 0)]
            rest = ticks[np.where(r >= 0, other + r * width[cut], 0)]
            np.maximum(found, ways + rest, out=found)
        return found

    def labels(
        self, ticks: Ticks, cut: Counts, offsets: tuple[Counts, Counts],
        links: Sequence[tuple[Counts, Counts]], extra: Counts | None,
    ) -> Ticks:  # fmt: skip
        """Labels of the pairs; shape (pairs, rows x columns).

        Args:
            ticks: all labels, one after another; the first entry is NEVER.
            offsets: where those of either part begin.
            extra: ticks between the parts; shape (pairs,).
        """
        (one, other), (width, other_width) = offsets, self._width
        rows, columns = self._rows[0][cut], self._columns[1][cut]
        found = self._own(ticks, cut, one, 0)
        np.maximum(found, self._own(ticks, cut, other, 1), out=found)
        for column, row in links:
            c, r = column[cut, None], row[cut, None]
            at = one[:, None] + rows * width[cut, None] + c
            ways = ticks[np.where((rows >= 0) & (c >= 0), at, 0)]
            if extra is not None:
                ways += extra[:, None].astype(np.int16)
            at = other[:, None] + r * other_width[cut, None] + columns
            rest = ticks[np.where((columns >= 0) & (r >= 0), at, 0)]
            np.maximum(found, ways[:, :, None] + rest[:, None, :], out=found)
        found[found < 0] = NEVER
        return found.reshape(len(cut), found.shape[1] * found.shape[2])

    def _own(self, ticks: Ticks, cut: Counts, offset: Counts, part: int) -> Ticks:
        """Ways within one part; shape (pairs, rows, columns)."""
        rows, columns = self._rows[part][cut], self._columns[part][cut]
        at = offset[:, None] + rows * self._width[part][cut, None]
        there = (rows >= 0)[:, :, None] & (columns >= 0)[:, None, :]
        return ticks[np.where(there, at[:, :, None] + columns[:, None, :], 0)]


def _ported(places: Counts) -> Counts:
    """Rows or columns of the first and last passage at each place, after that of the whole."""
    found = np.zeros((len(places), 1 + 2 * places.shape[1]), np.int64)
    found[:, 1::2] = np.where(places >= 0, 1 + 2 * places, NONE)
    found[:, 2::2] = np.where(places >= 0, 2 + 2 * places, NONE)
    return found

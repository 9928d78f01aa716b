"""Which rows of two fronts are worth composing."""

import numpy as np

from rlinf.sched.front import Front
from rlinf.sched.machine import Counts

Rows = tuple[Counts, Counts, Counts]
"""Rows of the first front, rows of the second, resources taken together."""


def side_by_side(first: Front, second: Front, budget: Counts, last: bool) -> Rows:
    """Pairs on separate devices within the budget.

    Args:
        last: nothing else is left to place, so the rest of the budget goes to whichever side
            is better with every device more.
    """
    if len(budget) > 1:
        i, j = _product(len(first), len(second))
        used = first.used[i] + second.used[j]
        fits = (used <= budget).all(axis=1)
        return i[fits], j[fits], used[fits]
    n1, n2, most = first.used[:, 0], second.used[:, 0], int(budget[0])
    if last and second.ordered:
        j = np.searchsorted(n2, most - n1, side="right") - 1
        i = np.flatnonzero(j >= 0)
        j = j[i]
    elif last and first.ordered:
        i = np.searchsorted(n1, most - n2, side="right") - 1
        j = np.flatnonzero(i >= 0)
        i = i[j]
    else:
        order = None if bool((np.diff(n2) >= 0).all()) else np.argsort(n2, kind="stable")
        sorted_n2 = n2 if order is None else n2[order]
        counts = np.searchsorted(sorted_n2, most - n1, side="right")
        i, j = ragged(counts)
        j = j if order is None else order[j]
    return i, j, (n1[i] + n2[j])[:, None]


def in_turn(first: Front, second: Front) -> Rows:
    """Pairs on the same devices."""
    if first.used.shape[1] > 1:
        i, j = _product(len(first), len(second))
        return i, j, np.maximum(first.used[i], second.used[j])
    n1, n2 = first.used[:, 0], second.used[:, 0]
    if first.ordered and second.ordered:
        if not len(n1) or not len(n2):
            none = np.zeros(0, np.int64)
            return none, none, np.zeros((0, 1), np.int64)
        levels = np.union1d(n1, n2)
        levels = levels[levels >= max(n1[0], n2[0])]
        i = np.searchsorted(n1, levels, side="right") - 1
        j = np.searchsorted(n2, levels, side="right") - 1
        return i, j, levels[:, None]
    i, j = _product(len(first), len(second))
    used = np.maximum(n1[i], n2[j])
    if first.ordered:
        best = np.searchsorted(n1, used, side="right") - 1
        keep = i == best
    elif second.ordered:
        best = np.searchsorted(n2, used, side="right") - 1
        keep = j == best
    else:
        keep = np.ones(len(i), bool)
    return i[keep], j[keep], used[keep][:, None]


def ragged(counts: Counts) -> tuple[Counts, Counts]:
    """(row, 0), (row, 1), ... (row, counts[row] - 1) for every row."""
    total = int(counts.sum())
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return rows, np.arange(total) - np.repeat(starts, counts)


def _product(first: int, second: int) -> tuple[Counts, Counts]:
    return np.repeat(np.arange(first), second), np.tile(np.arange(second), first)

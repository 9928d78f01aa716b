"""Fronts: sub-plans of which none is worse than another in everything."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlinf.sched.algebra import Labels
from rlinf.sched.cost import Options
from rlinf.sched.machine import Counts

Floats = npt.NDArray[np.float64]
Op = Literal["leaf", "whole", "spatial", "parallel", "temporal", "resident"]

FLAT = 10
"""Fronts of one resource and one rate are cheap to compose: so many times longer ones are kept."""

BLOCK = 1 << 21
"""Comparisons done at once when fronts are thinned pairwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """From which two fronts some rows of a front were composed, and how."""

    op: Op
    first: "Front | None" = None
    second: "Front | None" = None
    parts: int = 1
    options: Options | None = None
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Sub-plans of one set of components.

    Attributes:
        used: resources taken; shape (k, resources).
        labels: how each behaves; k rows.
        origins: what the rows were composed of.
        origin: which of the origins; shape (k,).
        i: row of the origin's first front, or option of its component; shape (k,).
        j: row of the origin's second front; shape (k,).
        ordered: rows by increasing use of the only resource, and every row better in everything
            than those before it.
        bound: relative error the thinning of this front and of those below it can have caused.
    """

    used: Counts
    labels: Labels
    origins: tuple[Origin, ...]
    origin: Counts
    i: Counts
    j: Counts
    ordered: bool = False
    bound: float = 0.0

    def __len__(self) -> int:
        return len(self.used)

    def take(self, rows: Counts) -> "Front":
        """Only these rows."""
        return Front(
            self.used[rows],
            self.labels.take(rows),
            self.origins,
            self.origin[rows],
            self.i[rows],
            self.j[rows],
            self.ordered,
            self.bound,
        )


def join(fronts: list[Front], like: Labels, width: int) -> Front:
    """One front of all rows; ``like`` gives the shape where there are none."""
    fronts = [front for front in fronts if len(front)]
    if not fronts:
        none = np.zeros(0, np.int64)
        return Front(np.zeros((0, width), np.int64), like, (), none, none, none)
    if len(fronts) == 1:
        return fronts[0]
    kinds = {front.labels.curve is None for front in fronts}
    labels = [front.labels if len(kinds) == 1 else front.labels.affine() for front in fronts]
    shifts = np.cumsum([0, *(len(front.origins) for front in fronts[:-1])])
    values = np.concatenate([label.values for label in labels])
    shape = labels[0]
    curves = [label.curve for label in labels if label.curve is not None]
    curve = np.concatenate(curves) if curves else None
    return Front(
        np.concatenate([front.used for front in fronts]),
        Labels(values, shape.before, shape.after, shape.parts, curve),
        tuple(origin for front in fronts for origin in front.origins),
        np.concatenate([f.origin + shift for f, shift in zip(fronts, shifts, strict=True)]),
        np.concatenate([front.i for front in fronts]),
        np.concatenate([front.j for front in fronts]),
        bound=max(front.bound for front in fronts),
    )


def prune(front: Front, limit: int, tolerance: float) -> Front:
    """Drop rows that another row is at least as good as; thin what is still too long."""
    if len(front) < 2:
        return _flag(front)
    values = front.labels.values
    if front.labels.curve is not None:
        return _flag(front)
    if front.used.shape[1] == 1:
        if values.shape[1] == 1:
            return _flag(front.take(_lowest(front.used[:, 0], values[:, 0])))
        if values.shape[1] == 3 and not values[:, 2].any():
            kept = front.take(_staircase(front.used[:, 0], values[:, 0], values[:, 1]))
            most = limit * FLAT
            return _flag(kept if len(kept) <= most else _thinned(kept, most, tolerance))
    if len(front) > limit:
        front = _first_in_cells(front, 0.0)
    if len(front) > limit * 4:
        front = _thinned(front, limit * 4, tolerance)
    kept = front.take(_pairwise(np.concatenate([front.used, front.labels.values], axis=1)))
    return kept if len(kept) <= limit else _thinned(kept, limit, tolerance)


def narrow(front: Front, beam: int) -> Front:
    """For each use of resources only the rows that end first, and that depart quickest."""
    if len(front) < 2:
        return _flag(front)
    ends = front.labels.x()
    rates = front.labels.values[:, -2] if front.labels.values.shape[1] > 1 else ends
    n = front.used
    chosen = []
    for score in (ends, rates + 1e-3 * ends):
        order = np.lexsort((score, *n.T[::-1]))
        sorted_n = n[order]
        fresh = np.r_[True, (sorted_n[1:] != sorted_n[:-1]).any(axis=1)]
        starts = np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
        rank = np.arange(len(order)) - starts
        kept = order[rank < max(1, beam // 2)]
        if n.shape[1] == 1:
            best = np.minimum.accumulate(np.r_[np.inf, score[kept]])[:-1]
            kept = kept[score[kept] < best]
        chosen.append(kept)
    rows = np.unique(np.concatenate(chosen))
    return _flag(front.take(rows[np.argsort(n[rows, 0], kind="stable")]))


def _flag(front: Front) -> Front:
    if front.used.shape[1] != 1 or front.labels.curve is not None:
        return front
    values = front.labels.values
    ordered = bool((np.diff(values, axis=0) <= 0).all()) if len(front) else True
    ordered = ordered and bool((np.diff(front.used[:, 0]) > 0).all())
    return Front(
        front.used,
        front.labels,
        front.origins,
        front.origin,
        front.i,
        front.j,
        ordered,
        front.bound,
    )


def _lowest(used: Counts, value: Floats) -> Counts:
    order = np.lexsort((value, used))
    best = np.minimum.accumulate(np.r_[np.inf, value[order]])[:-1]
    return np.asarray(order[value[order] < best])


def _staircase(used: Counts, first: Floats, rate: Floats) -> Counts:
    """Rows by (used, A, R) that no earlier row beats, found on a table of all (used, R)."""
    n, n_at = np.unique(used, return_inverse=True)
    r, r_at = np.unique(rate, return_inverse=True)
    if len(n) * len(r) > 4_000_000:
        return _pairwise(np.stack([used, first, rate], axis=1))
    order = np.lexsort((rate, first, used))
    cell = (n_at * len(r) + r_at)[order]
    table = np.full(len(n) * len(r), np.inf)
    value = first[order]
    np.minimum.at(table, cell, value)
    better = np.full((len(n) + 1, len(r) + 1), np.inf)
    better[1:, 1:] = np.minimum.accumulate(
        np.minimum.accumulate(table.reshape(len(n), len(r)), axis=0), axis=1
    )
    rows, columns = cell // len(r), cell % len(r)
    left, below = better[rows + 1, columns], better[rows, columns + 1]
    keep = (value == table[cell]) & (value < left) & (value < below)
    kept = order[keep]
    _, once = np.unique(cell[keep], return_index=True)
    return np.asarray(kept[np.sort(once)])


def _pairwise(points: Floats) -> Counts:
    """Rows that no other row is at most equal to in every column; equal rows are kept once."""
    order = np.lexsort(points.T[::-1])
    points = points[order]
    kept = np.zeros(0, np.int64)
    step = max(16, BLOCK // (max(1, len(points)) * points.shape[1]))
    for start in range(0, len(points), step):
        block = points[start : start + step]
        if len(kept):
            beaten: npt.NDArray[np.bool_] = np.zeros(len(block), bool)
            old = points[kept]
            for low in range(0, len(old), 4096):
                part = old[low : low + 4096]
                beaten |= np.any(np.all(part[None] <= block[:, None], axis=2), axis=1)
            alive = np.flatnonzero(~beaten)
        else:
            alive = np.arange(len(block))
        inner = block[alive]
        worse = (inner[None] <= inner[:, None]).all(axis=2)
        worse &= np.tri(len(inner), k=-1, dtype=bool)
        kept = np.concatenate([kept, start + alive[~worse.any(axis=1)]])
    return np.sort(order[kept])


def _first_in_cells(front: Front, tolerance: float) -> Front:
    """The lowest end in each cell of a logarithmic grid; with tolerance 0, of equal rows."""
    values = front.labels.values
    if tolerance:
        logs = np.log(np.maximum(values, 1e-9)) / np.log1p(tolerance)
        grid = np.where(values > 0, np.floor(logs), -1e9)
    else:
        grid = values
    cells = np.concatenate([front.used, grid], axis=1)
    order = np.lexsort((values.sum(axis=1), *cells.T))
    ordered = cells[order]
    fresh = np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)]
    return front.take(np.sort(order[fresh]))


def _thinned(front: Front, limit: int, tolerance: float) -> Front:
    while len(front) > limit:
        thinner = _first_in_cells(front, tolerance)
        front = Front(
            thinner.used, thinner.labels, thinner.origins, thinner.origin, thinner.i, thinner.j,
            False, front.bound + tolerance,
        )  # fmt: skip
        tolerance *= 2
    return front

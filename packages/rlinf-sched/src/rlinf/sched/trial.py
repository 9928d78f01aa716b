"""Is there a plan within a limit?

In a pipeline of even stages the first and the last micro-batch decide: a component starts after the
first one of each of its producers, and has one left to do after their last. A plan takes as long as
the longest way through these beginnings and ends, and a part of a pipeline acts on the rest only by
the longest ways through it. They are its *label*, a matrix:

=======  ==========================================================================
rows     from the start; from the first and the last arrival at each component fed from outside
columns  to the end; to the first and the last departure of each component that feeds others
=======  ==========================================================================

Every component has its own number of micro-batches, from one: its first one starts after the first
one of each producer, and its last after their last, whatever their numbers are. Where numbers
differ it may have to wait for more, so the longest way is a lower bound; where all members of a
pipeline have the same, it is exact. First every set is given the most seconds that the packings of
the rest leave it; then labels are composed over the cuts that fit, from small sets to large ones.
Seconds are whole numbers of ticks, rounded down, and some labels like one another become one at
least as quick as each of them: the least end is a lower bound on every plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlinf.sched.fit import Floats
from rlinf.sched.joint import Joint
from rlinf.sched.layout import Layout
from rlinf.sched.machine import Counts
from rlinf.sched.pairing import ragged
from rlinf.sched.rows import NEVER, Pool, Rows, Ticks, cover

TICKS = 7000
"""Ticks in a limit."""

SLACK = 1 + 1e-9

COMPARING = 10
"""So many numbers are compared in the time that one entry of a label takes."""

BLOCK = 100_000
"""Pairs composed at once."""


class TooManyError(Exception):
    """The trial would take more work than its budget: the limit may be possible."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Labels to compose: which cut, which row of either part, and what comes of them.

    Attributes:
        cut: shape (pairs,), as the others.
        first: row of the first part.
        second: row of the second part.
        used: units of devices of both.
    """

    cut: Counts
    first: Counts
    second: Counts
    used: Counts

    def take(self, rows: npt.NDArray[np.generic]) -> "Pairs":
        """Only these."""
        return Pairs(self.cut[rows], self.first[rows], self.second[rows], self.used[rows])


@dataclass(slots=True)
class Trial:
    """One limit put to the test.

    Attributes:
        limit: seconds.
        alike: ticks by which labels may differ that become one.
        alive: by set, which of its cuts fit.
        rows: by set, its labels.
        budget: most work.
        work: entries of labels composed, and what else takes as long.
    """

    layout: Layout
    limit: float
    alike: int
    budget: float = np.inf
    alive: dict[int, Counts] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    work: float = 0.0
    _allowed: Floats = field(init=False)
    _pool: Pool = field(default_factory=Pool)

    def least(self) -> float:
        """Seconds that no plan within the limit can beat; infinite where there is none.

        Raises:
            TooManyError: it would take more than the budget.
        """
        last = len(self.layout.sets) - 1
        self._share_out()
        for k in range(last + 1):
            if self._allowed[k, 0] >= 0:
                ticks = np.floor(self._allowed[k] * (SLACK / self.tick)).astype(np.int64)
                most = np.where(self._allowed[k] >= 0, ticks, -1)
                if len(self.layout.cuts[k]) == 0:
                    self._single(k, most)
                elif k in self.alive:
                    self._composed(k, most)
        return float(self.rows[last].least()[-1]) * self.tick if last in self.rows else np.inf

    def spans(self) -> Floats:
        """Least seconds of every set, as far as the trial has shown; shape (sets, units + 1)."""
        spans = self.layout.spans.copy()
        for k in np.flatnonzero(self._allowed[:, 0] >= 0).tolist():
            known = self._allowed[k]
            if k in self.rows:
                known = np.minimum(known, self.rows[k].least() * self.tick)
            np.maximum(spans[k], known, out=spans[k])
        return np.asarray(np.maximum.accumulate(spans[:, ::-1], axis=1)[:, ::-1])

    @property
    def tick(self) -> float:
        """Seconds of a tick."""
        return self.limit / TICKS

    # Seconds left for each set

    def _share_out(self) -> None:
        layout = self.layout
        self._allowed = np.full(layout.spans.shape, -1.0)
        self._allowed[-1, -1] = self.limit
        for k in reversed(range(len(layout.sets))):
            mine, cuts = self._allowed[k], layout.cuts[k]
            mine[mine * SLACK < layout.spans[k]] = -1.0
            on_more = np.maximum.accumulate(mine[::-1])[-2::-1]
            levels = np.flatnonzero(mine > np.append(on_more, -1.0))
            if not len(cuts) or not len(levels):
                continue
            fits = np.zeros(len(cuts), bool)
            for n in levels:
                fits |= self._left_for_both(k, int(n), float(mine[n]))
            if fits.any():
                self.alive[k] = np.flatnonzero(fits)
        # What may be done on more units may be done on some of them.
        self._allowed = np.maximum.accumulate(self._allowed[:, ::-1], axis=1)[:, ::-1]

    def _left_for_both(self, k: int, n: int, most: float) -> npt.NDArray[np.bool_]:
        """Raise what both parts of the cuts that fit into ``most`` seconds on n units may take."""
        layout, allowed = self.layout, self._allowed
        cuts, switches = layout.cuts[k], layout.switches[k]
        first, second = layout.spans[cuts[:, 0]], layout.spans[cuts[:, 1]]
        fits = first[:, n] + second[:, n] + switches <= most * SLACK
        in_turn = np.flatnonzero(fits)
        for part, other in ((0, second), (1, first)):
            left = most - other[in_turn, n] - switches[in_turn]
            np.maximum.at(allowed, (cuts[in_turn, part], n), left)
        short = most * SLACK
        beside, units = np.nonzero((first[:, : n + 1] <= short) & (second[:, n::-1] <= short))
        np.maximum.at(allowed, (cuts[beside, 0], units), most)
        np.maximum.at(allowed, (cuts[beside, 1], n - units), most)
        fits[beside] = True
        return fits

    def _spend(self, work: float) -> None:
        self.work += work
        if self.work > self.budget:
            raise TooManyError

    def _spend_comparing(self, numbers: int) -> None:
        self._spend(numbers / COMPARING)

    # Labels

    def _single(self, k: int, most: Counts) -> None:
        ways = self.layout.ways[self.layout.sets[k].bit_length() - 1]
        run = np.floor(ways.run / self.tick)
        keep = np.flatnonzero(run <= most[ways.used])
        run, once = run[keep], ways.number[keep] == 0
        step = np.floor(ways.step[keep] / self.tick)
        rows, columns = self.layout.shape(k)
        labels = np.full((len(keep), rows, columns), NEVER, np.int16)
        labels[:, :, 0] = run[:, None]
        labels[:, :, 1::2] = step[:, None, None]
        labels[:, :, 2::2] = run[:, None, None]
        last = np.where(once, run, step)
        labels[:, 2::2, 0] = last[:, None]
        labels[:, 2::2, 2::2] = last[:, None, None]
        labels[:, 2::2, 1::2] = np.where(once, run, NEVER)[:, None, None]
        back = np.stack([np.zeros_like(keep), ways.option[keep], keep], axis=1)
        self._store(k, ways.used[keep], labels.reshape(len(keep), -1), back, self.alike // 2)

    def _store(self, k: int, used: Counts, labels: Ticks, back: Counts, alike: int) -> None:
        if len(used):
            keep, lowered = cover(used, labels, alike, self._spend_comparing)
            self.rows[k] = self._pool.add(self.layout.units, used[keep], lowered, back[keep])

    def _composed(self, k: int, most: Counts) -> None:
        layout = self.layout
        alive = self.alive[k]
        cuts = layout.cuts[k][alive]
        has = [bool(p in self.rows and q in self.rows) for p, q in cuts]
        if not any(has):
            return
        alive = alive[has]
        joint = Joint(layout, k, cuts[has])
        sides = self._gathered(joint.cuts[:, 0]), self._gathered(joint.cuts[:, 1])
        switch = np.floor(layout.switches[k][alive] / self.tick).astype(np.int64)
        found = []
        for in_turn in (True, False):
            links = joint.in_turn() if in_turn else joint.beside()
            for pairs in self._meeting(sides, most, switch if in_turn else None):
                offsets = self._offsets(joint, pairs)
                if not in_turn:
                    waited = joint.waits(self._pool.ticks, pairs.cut, offsets, links)
                    early = np.flatnonzero(waited <= most[pairs.used])
                    pairs, offsets = pairs.take(early), (offsets[0][early], offsets[1][early])
                rows, columns = self.layout.shape(k)
                self._spend(float(len(pairs.cut) * rows * columns))
                extra = switch[pairs.cut] if in_turn else None
                labels = joint.labels(self._pool.ticks, pairs.cut, offsets, links, extra)
                keep = labels[:, 0] <= most[pairs.used]
                pairs = pairs.take(keep)
                back = np.stack([2 * alive[pairs.cut] + in_turn, pairs.first, pairs.second], axis=1)
                found.append((pairs.used, labels[keep], back))
        if found:
            used, labels, back = (np.concatenate(column) for column in zip(*found, strict=True))
            self._store(k, used, labels, back, self.alike)

    def _offsets(self, joint: Joint, pairs: Pairs) -> tuple[Counts, Counts]:
        """Where the labels of each pair begin in the pool."""
        found = []
        for part, rows in ((0, pairs.first), (1, pairs.second)):
            base = np.array([self.rows[int(k)].base for k in joint.cuts[:, part]])
            found.append(base[pairs.cut] + rows * joint.sizes[part][pairs.cut])
        return found[0], found[1]

    def _meeting(
        self, sides: "tuple[Side, Side]", most: Counts, switch: Counts | None
    ) -> Iterator[Pairs]:
        """Pairs of labels of all cuts that may end early enough."""
        one, other = sides
        units = self.layout.units
        room = units if switch is not None else units - one.used
        counts = other.until[one.cut, room + 1]
        self._spend(float(counts.sum()))
        p, q = ragged(counts)
        q += other.starts[one.cut][p]
        if switch is not None:
            used = np.maximum(one.used[p], other.used[q])
            fits = one.ends[p] + other.ends[q] + switch[one.cut[p]] <= most[used]
        else:
            used = one.used[p] + other.used[q]
            fits = np.maximum(one.ends[p], other.ends[q]) <= most[used]
        kept = np.flatnonzero(fits)
        for low in range(0, len(kept), BLOCK):
            rows = kept[low : low + BLOCK]
            i, j = p[rows], q[rows]
            yield Pairs(one.cut[i], one.row[i], other.row[j], used[rows])

    def _gathered(self, sets: Counts) -> "Side":
        """The rows of one part of every cut."""
        known = [self.rows[int(k)] for k in sets]
        counts = np.array([len(rows.used) for rows in known])
        cut, row = ragged(counts)
        return Side(
            cut,
            row,
            np.cumsum(counts) - counts,
            np.concatenate([rows.used for rows in known]),
            np.concatenate([rows.ends for rows in known]),
            np.stack([rows.until for rows in known]),
        )


@dataclass(frozen=True, slots=True)
class Side:
    """The rows of the first, or the second, parts of all cuts of a set, one after another.

    Attributes:
        cut: of which cut; shape (rows,), as the next but one.
        row: its place among those of its part.
        starts: by cut, where its rows begin.
        used: units of devices.
        ends: ticks until its end.
        until: by cut, as :attr:`Rows.until`.
    """

    cut: Counts
    row: Counts
    starts: Counts
    used: Counts
    ends: Counts
    until: Counts

"""Is there a plan within a limit?

In a pipeline of even stages the first and the last micro-batch decide: a component starts after the
first one of each of its producers, and has one left to do after their last. A plan takes as long as
the longest way through these beginnings and ends, and a part of a pipeline acts on the rest only by
the longest ways through it. They are its *label*, a matrix:

=======  ==========================================================================
rows     from the start; from the first and the last arrival at each component fed from outside
columns  to the end; to the first and the last departure of each component that feeds others
=======  ==========================================================================

Every component of a pipeline has the pipeline's number of micro-batches or the whole batch. Sets
outside of pipelines have only an end. First every set is given the most seconds that the packings
of the rest leave it; then labels are composed over the cuts that fit, from small sets to large
ones. Seconds are whole numbers of ticks, rounded down, and where a set has too many labels, some
like one another become one at least as quick as each of them: the least end is a lower bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlinf.sched.fit import Floats
from rlinf.sched.joint import Joint
from rlinf.sched.layout import Layout
from rlinf.sched.machine import Counts
from rlinf.sched.pairing import ragged
from rlinf.sched.rows import NEVER, Pool, Rows, Ticks, merged, skyline

TICKS = 4000
"""Ticks in a limit."""

LATE = 1 << 20
"""Ticks of an end that is beyond the limit."""

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
        number: which number of micro-batches.
        used: units of devices of both.
    """

    cut: Counts
    first: Counts
    second: Counts
    number: Counts
    used: Counts

    def take(self, rows: npt.NDArray[np.generic]) -> "Pairs":
        """Only these."""
        return Pairs(
            self.cut[rows], self.first[rows], self.second[rows], self.number[rows], self.used[rows]
        )


@dataclass(slots=True)
class Trial:
    """One limit put to the test.

    Attributes:
        limit: seconds.
        most: labels of a set above which like ones are merged.
        alive: by set, which of its cuts fit.
        alone: by set, ticks until it ends outside of a pipeline, on so many units.
        rows: by set, its labels within pipelines.
        merged: some labels have been merged, so plans made of them may be slower than they look.
        budget: most work.
        work: entries of labels composed, and what else takes as long.
    """

    layout: Layout
    limit: float
    most: int
    budget: float = np.inf
    alive: dict[int, Counts] = field(default_factory=dict)
    alone: Counts = field(init=False)
    rows: dict[int, Rows] = field(default_factory=dict)
    merged: bool = False
    work: float = 0.0
    _allowed: Floats = field(init=False)
    _pool: Pool = field(default_factory=Pool)

    def least(self) -> float:
        """Seconds that no plan within the limit can beat; infinite where there is none.

        Raises:
            TooManyError: it would take more than the budget.
        """
        last = len(self.layout.sets) - 1
        self.alone = np.full(self.layout.spans.shape, LATE)
        self._share_out()
        if last and last not in self.alive:
            return np.inf
        for k in range(last + 1):
            most = np.maximum.accumulate(self._allowed[k][::-1])[::-1]
            if most[0] >= 0:
                ticks = np.floor(most * (SLACK / self.tick)).astype(np.int64)
                if len(self.layout.cuts[k]) == 0:
                    self._single(k, np.where(most >= 0, ticks, -1))
                elif k in self.alive:
                    self._composed(k, np.where(most >= 0, ticks, -1))
        end = int(self.alone[last, -1])
        return end * self.tick if end < LATE else np.inf

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
            levels = np.flatnonzero(mine >= 0)
            if not len(cuts) or not len(levels):
                continue
            fits = np.zeros(len(cuts), bool)
            for n in levels:
                fits |= self._left_for_both(k, int(n), float(mine[n]))
            if fits.any():
                self.alive[k] = np.flatnonzero(fits)

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

    # Labels

    def _single(self, k: int, most: Counts) -> None:
        ways = self.layout.ways[self.layout.sets[k].bit_length() - 1]
        run = np.floor(ways.run / self.tick)
        keep = np.flatnonzero(run <= most[ways.used])
        number, run = ways.number[keep], run[keep]
        step = np.floor(ways.step[keep] / self.tick)
        once = number == 0
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
        self._store(k, number, ways.used[keep], labels.reshape(len(keep), -1), back)

    def _store(self, k: int, number: Counts, used: Counts, labels: Ticks, back: Counts) -> None:
        if len(number):
            shape = len(self.layout.numbers), self.layout.units
            self.rows[k] = self._pool.add(shape, number, used, labels, back)
            np.minimum.at(self.alone[k], used, labels[:, 0])
            np.minimum.accumulate(self.alone[k], out=self.alone[k])

    def _composed(self, k: int, most: Counts) -> None:
        layout = self.layout
        alive = self.alive[k]
        joint = Joint(layout, k, layout.cuts[k][alive])
        self._outside(k, joint, most)
        has = [bool(p in self.rows and q in self.rows) for p, q in joint.cuts]
        if not any(has):
            return
        alive = alive[has]
        joint = Joint(layout, k, layout.cuts[k][alive])
        switch = np.floor(layout.switches[k][alive] / self.tick).astype(np.int64)
        found = []
        for in_turn in (True, False):
            links = joint.in_turn() if in_turn else joint.beside()
            for pairs in self._meeting(joint, most, switch if in_turn else None):
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
                found.append((pairs.number, pairs.used, labels[keep], back))
        if found:
            self._keep_best(k, *(np.concatenate(column) for column in zip(*found, strict=True)))

    def _keep_best(self, k: int, number: Counts, used: Counts, labels: Ticks, back: Counts) -> None:
        keep, compared = skyline(number, used, labels)
        self._spend(compared / COMPARING)
        table = number[keep], used[keep], labels[keep], back[keep]
        if len(keep) > self.most:
            self.merged = True
            table = merged(*table, self.most)
        self._store(k, *table)

    def _offsets(self, joint: Joint, pairs: Pairs) -> tuple[Counts, Counts]:
        """Where the labels of each pair begin in the pool."""
        found = []
        for part, rows in ((0, pairs.first), (1, pairs.second)):
            base = np.array([self.rows[int(k)].base for k in joint.cuts[:, part]])
            found.append(base[pairs.cut] + rows * joint.sizes[part][pairs.cut])
        return found[0], found[1]

    def _outside(self, k: int, joint: Joint, most: Counts) -> None:
        """Ends outside of a pipeline: in turn, or side by side where neither feeds the other."""
        alone, layout = self.alone[k], self.layout
        first, second = self.alone[joint.cuts[:, 0]], self.alone[joint.cuts[:, 1]]
        switch = np.floor(layout.switches[k][self.alive[k]] / self.tick).astype(np.int64)
        np.minimum(alone, (first + second + switch[:, None]).min(axis=0), out=alone)
        apart = np.flatnonzero(~joint.edge)
        if len(apart):
            for n in range(layout.units + 1):
                ends = np.maximum(first[apart, : n + 1], second[apart, n::-1])
                alone[n] = min(alone[n], ends.min())
        np.minimum.accumulate(alone, out=alone)
        alone[alone > most] = LATE

    # Which labels meet

    def _meeting(self, joint: Joint, most: Counts, switch: Counts | None) -> Iterator[Pairs]:
        """Pairs of labels of one pipeline, or with the whole batch, that may end early enough."""
        sides = [self._gathered(joint.cuts[:, part]) for part in (0, 1)]
        one, other = sides
        piped, other_piped = np.flatnonzero(one.number), np.flatnonzero(other.number)
        whole = np.zeros_like(one.number)
        yield from self._matched(sides, np.arange(len(whole)), whole, False, most, switch)
        yield from self._matched(sides, piped, one.number[piped], False, most, switch)
        none = np.zeros_like(other_piped)
        yield from self._matched(sides, other_piped, none, True, most, switch)

    def _gathered(self, sets: Counts) -> "Side":
        """The rows of one part of every cut."""
        known = [self.rows[int(k)] for k in sets]
        cut, row = ragged(np.array([len(rows.number) for rows in known]))
        starts = np.flatnonzero(np.r_[True, cut[1:] != cut[:-1]])
        return Side(
            cut,
            row,
            starts,
            np.concatenate([rows.number for rows in known]),
            np.concatenate([rows.used for rows in known]),
            np.concatenate([rows.ends for rows in known]),
            np.stack([rows.until for rows in known]),
        )

    def _matched(
        self, sides: "Sequence[Side]", at: Counts, number: Counts, swapped: bool,
        most: Counts, switch: Counts | None,
    ) -> Iterator[Pairs]:  # fmt: skip
        """Rows ``at`` of one side with those of the other that have this number."""
        mine, theirs = reversed(sides) if swapped else sides
        units = self.layout.units
        cut = mine.cut[at]
        room = units if switch is not None else units - mine.used[at]
        start = theirs.until[cut, number, 0]
        counts = theirs.until[cut, number, room + 1] - start
        self._spend(float(counts.sum()))
        a, b = ragged(counts)
        b += (start + theirs.starts[cut])[a]
        a = at[a]
        p, q = (b, a) if swapped else (a, b)
        one, other = sides
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
            numbers = np.maximum(one.number[i], other.number[j])
            yield Pairs(one.cut[i], one.row[i], other.row[j], numbers, used[rows])


@dataclass(frozen=True, slots=True)
class Side:
    """The rows of the first, or the second, parts of all cuts of a set, one after another.

    Attributes:
        cut: of which cut; shape (rows,), as the next but one.
        row: its place among those of its part.
        starts: by cut, where its rows begin.
        number: which number of micro-batches.
        used: units of devices.
        ends: ticks until its end.
        until: by cut, as :attr:`Rows.until`.
    """

    cut: Counts
    row: Counts
    starts: Counts
    number: Counts
    used: Counts
    ends: Counts
    until: Counts

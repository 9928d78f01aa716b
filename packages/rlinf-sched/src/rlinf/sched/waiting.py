"""What waiting adds to a packing: a consumer neither starts nor ends before its producers.

A packing may put b after a beside c, although b feeds c: then c has to wait for a.
To show that no plan takes ``limit`` seconds, every set of components is given the most seconds that
the packings of the rest leave it, on each number of devices. Within those, from small sets to large
ones, four *lags* of every component in its set are bounded from below: seconds from the start of
the set to the component's start and to its end, and from either to the end of the set. Where two
sets lie side by side, the lags of producers and consumers add up, and some cuts turn out to be too
long. When none is left for the whole workflow, the limit is impossible.
"""

from dataclasses import dataclass, field

import numpy as np

from rlinf.sched.cost import CostModel, bits
from rlinf.sched.cuts import Cut
from rlinf.sched.fit import Floats
from rlinf.sched.machine import Counts
from rlinf.sched.packing import Packing

STEPS = 6
"""Limits tried by bisection."""

ROUNDS = 2
"""How often the sets' seconds are shared out anew, with what waiting has ruled out."""

MOST_CUTS = 1500
"""A limit that leaves more cuts alive is taken for possible."""

SLACK = 1 + 1e-9

START, START_TO_END, END, END_TO_END = range(4)


def raised_bound(model: CostModel, packing: Packing, low: float, high: float) -> float:
    """Seconds that no plan can beat.

    Args:
        low: seconds for which that is known.
        high: what the best plan found takes.
    """
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        if Trial(model, packing, middle).possible():
            high = middle
        else:
            low = middle
    return low


@dataclass(slots=True)
class Trial:
    """One limit put to the test.

    Attributes:
        limit: seconds.
        spans: by set, least seconds on 0, 1, ... units of devices, as far as they matter.
        allowed: by set, most seconds on so many units; less than none where it has no place.
        alive: by set, the cuts that fit.
        lags: by set, the four lags of its members; shape (4, members, units + 1).
    """

    model: CostModel
    packing: Packing
    limit: float
    spans: dict[int, Floats] = field(default_factory=dict)
    allowed: dict[int, Floats] = field(default_factory=dict)
    alive: dict[int, list[Cut]] = field(default_factory=dict)
    lags: dict[int, Floats] = field(default_factory=dict)

    def possible(self) -> bool:
        """It could not be shown that no plan takes the limit or less."""
        everything = max(self.packing.spans)
        self.spans = dict(self.packing.spans)
        for _ in range(ROUNDS):
            if not self._share_out(everything):
                return True
            if everything not in self.alive:
                return False
            self._add_up()
            if everything not in self.lags:
                return False
        return True

    def _share_out(self, everything: int) -> bool:
        """Seconds for every set, from the whole down; false: too many cuts are alive."""
        units = len(self.spans[everything]) - 1
        none = np.full(units + 1, -np.inf)
        self.allowed, self.alive = {everything: none.copy()}, {}
        self.allowed[everything][units] = self.limit
        count = 0
        for members in sorted(self.packing.cuts, key=lambda s: -s.bit_count()):
            if members not in self.allowed or members not in self.spans:
                continue
            mine = self.allowed[members]
            mine[mine * SLACK < self.spans[members]] = -np.inf
            if not (mine > 0).any():
                continue
            for cut in self.packing.cuts[members][0]:
                if cut.first in self.spans and cut.second in self.spans:
                    one, other = self._left_for(cut, mine)
                    if (one > 0).any():
                        self.alive.setdefault(members, []).append(cut)
                        for part, seconds in ((cut.first, one), (cut.second, other)):
                            known = self.allowed.get(part, none)
                            self.allowed[part] = np.maximum(known, seconds)
            count += len(self.alive.get(members, ()))
            if count > MOST_CUTS:
                return False
        return True

    def _left_for(self, cut: Cut, mine: Floats) -> tuple[Floats, Floats]:
        """Most seconds for either part of a set that has so many."""
        first, second = self.spans[cut.first], self.spans[cut.second]
        switch_s = self._switch(cut)
        fits = first + second + switch_s <= mine * SLACK
        one = np.where(fits, mine - second - switch_s, -np.inf)
        other = np.where(fits, mine - first - switch_s, -np.inf)
        n, k = _beside(first, second, mine)
        np.maximum.at(one, k, mine[n])
        np.maximum.at(other, n - k, mine[n])
        return one, other

    def _add_up(self) -> None:
        """Lags and least seconds of every set that has a place, from single components up."""
        packed, self.spans, self.lags = self.spans, {}, {}
        for members in sorted(self.allowed, key=int.bit_count):
            mine = self.allowed[members]
            if members & (members - 1) == 0:
                seconds = np.where(packed[members] <= mine * SLACK, packed[members], np.inf)
                nothing = np.where(np.isfinite(seconds), 0.0, np.inf)
                lags = np.stack([nothing, seconds, seconds, nothing])[:, None]
            elif members in self.alive:
                seconds = np.full(len(mine), np.inf)
                lags = np.full((4, members.bit_count(), len(mine)), np.inf)
                for cut in self.alive[members]:
                    if cut.first in self.lags and cut.second in self.lags:
                        self._compose(members, cut, seconds, lags)
            else:
                continue
            if np.isfinite(seconds).any():
                self.spans[members], self.lags[members] = seconds, lags

    def _compose(self, members: int, cut: Cut, seconds: Floats, lags: Floats) -> None:
        """Lower ``seconds`` and ``lags`` to those of the set cut so."""
        mine = self.allowed[members]
        first, second = self.spans[cut.first], self.spans[cut.second]
        one, other = self.lags[cut.first], self.lags[cut.second]
        where = bits(members)
        mine_of = [where.index(i) for i in (*bits(cut.first), *bits(cut.second))]
        switch_s = self._switch(cut)
        in_turn = first + second + switch_s
        at = np.flatnonzero(in_turn <= mine * SLACK)
        if len(at):
            seconds[at] = np.minimum(seconds[at], in_turn[at])
            before, after = one[:, :, at].copy(), other[:, :, at].copy()
            before[[START_TO_END, END_TO_END]] += second[at] + switch_s
            after[[START, END]] += first[at] + switch_s
            _lower(lags, mine_of, at, np.concatenate([before, after], axis=1))
        n, k = _beside(first, second, mine)
        if not len(n):
            return
        before, after = one[:, :, k], other[:, :, n - k]
        length = np.maximum(first[k], second[n - k])
        if cut.edge:
            length = np.maximum(length, self._wait(cut, before, after))
        fits = np.flatnonzero(length <= mine[n] * SLACK)
        if len(fits):
            at, starts = np.unique(n[fits], return_index=True)
            least = np.minimum.reduceat(length[fits], starts)
            seconds[at] = np.minimum(seconds[at], least)
            both = np.concatenate([before, after], axis=1)[:, :, fits]
            _lower(lags, mine_of, at, np.minimum.reduceat(both, starts, axis=2))

    def _wait(self, cut: Cut, before: Floats, after: Floats) -> Floats:
        """Raise the lags of producers and consumers to one another's; and the seconds it takes."""
        producers, consumers = bits(cut.first), bits(cut.second)
        fed_by = {
            y: [x for x, i in enumerate(producers) if self.model.anc[j] >> i & 1]
            for y, j in enumerate(consumers)
        }
        tails = after[[START_TO_END, END_TO_END]]
        for y, sources in fed_by.items():
            if sources:
                heads = before[:, sources][[START, END]].max(axis=1)
                after[[START, END], y] = np.maximum(after[[START, END], y], heads)
        for x in range(len(producers)):
            sinks = [y for y, sources in fed_by.items() if x in sources]
            if sinks:
                rest = tails[:, sinks].max(axis=1)
                ends = [START_TO_END, END_TO_END]
                before[ends, x] = np.maximum(before[ends, x], rest)
        whole = after[[START, END]] + after[[START_TO_END, END_TO_END]]
        return np.asarray(whole.max(axis=(0, 1)))

    def _switch(self, cut: Cut) -> float:
        return 0.0 if self.model.tight else self.model.switch(cut.first, cut.second)


def _beside(first: Floats, second: Floats, mine: Floats) -> tuple[Counts, Counts]:
    """Units in all, and units of the first part, at which both fit side by side; by the former."""
    n = np.flatnonzero(mine > 0)
    k = np.flatnonzero(np.isfinite(first))
    rest = n[:, None] - k
    long = np.maximum(first[k], np.where(rest > 0, second[rest], np.inf))
    rows, columns = np.nonzero(long <= mine[n][:, None] * SLACK)
    return n[rows], k[columns]


def _lower(lags: Floats, members: list[int], at: Counts, values: Floats) -> None:
    rows = np.array(members)[:, None]
    lags[:, rows, at] = np.minimum(lags[:, rows, at], values)

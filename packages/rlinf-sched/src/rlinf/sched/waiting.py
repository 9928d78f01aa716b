"""What waiting adds to a packing: a consumer neither starts nor ends before its producers.

A packing may put b after a beside c, although b feeds c: then c has to wait for a.
To show that no plan takes ``limit`` seconds, every set of components is given the most seconds that
the packings of the rest leave it, on each number of devices and at each grain of micro-batches.
Within those, from small sets to large ones, *lags* of every component in its set are bounded from
below: seconds from the start of the set to the component's start and to its end, from either to the
end of the set, and how long one micro-batch and the whole run take. Where two sets lie side by
side, the lags add up along the edges, and some cuts turn out to be too long. When none is left for
the whole workflow, the limit is impossible.

Arrays by state have an entry for each grain and, within it, each number of units.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlinf.sched.cost import CostModel, bits
from rlinf.sched.cuts import Cut
from rlinf.sched.fit import Floats
from rlinf.sched.machine import Counts
from rlinf.sched.packing import Packing
from rlinf.sched.segments import Prices, Ways, ways_beside, ways_in_turn

STEPS = 5
"""Limits tried by bisection."""

ROUNDS = 2
"""How often the sets' seconds are shared out anew, with what waiting has ruled out."""

MOST_CUTS = 1500
"""A limit that leaves more cuts alive is taken for possible."""

SLACK = 1 + 1e-9

START, START_TO_END, END, END_TO_END, STEP, RUN = range(6)


FEW_CUTS = 400
"""Up to so many cuts, those that a limit leaves alive are worth a search of their own."""


class Raised(NamedTuple):
    """What trials of limits have shown.

    Attributes:
        seconds: what no plan can beat whose pipelines have one number of micro-batches each.
        cuts: by set, all that plans below some limit can be made of; empty: too many.
    """

    seconds: float
    cuts: Mapping[int, Sequence[Cut]]


def raised_bound(
    model: CostModel, packing: Packing, prices: Prices, low: float, high: float
) -> Raised:
    """Halve the distance between a lower bound and a plan, as often as STEPS says.

    Args:
        low: seconds that no plan can beat.
        high: what the best plan found takes.
    """
    cuts: Mapping[int, Sequence[Cut]] = {}
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        trial = Trial(model, packing, prices, middle)
        if trial.possible():
            high = middle
            if not cuts and sum(map(len, trial.alive.values())) <= FEW_CUTS:
                cuts = trial.alive
        else:
            low = middle
    return Raised(low, cuts)


@dataclass(slots=True)
class Trial:
    """One limit put to the test.

    Attributes:
        limit: seconds.
        spans: by set, least seconds in each state, as far as they matter; shape (states,).
        allowed: by set, most seconds in each state; less than none where it has no place.
        alive: by set, the cuts that fit.
        lags: by set, the six lags of its members; shape (6, members, states).
    """

    model: CostModel
    packing: Packing
    prices: Prices
    limit: float
    spans: dict[int, Floats] = field(default_factory=dict)
    allowed: dict[int, Floats] = field(default_factory=dict)
    alive: dict[int, list[Cut]] = field(default_factory=dict)
    lags: dict[int, Floats] = field(default_factory=dict)

    def possible(self) -> bool:
        """It could not be shown that no plan takes the limit or less."""
        everything = max(self.packing.spans)
        grains = self.prices.grains
        self.spans = {s: np.tile(spans, grains) for s, spans in self.packing.spans.items()}
        self.spans |= {1 << i: s.ravel() for i, s in enumerate(self.prices.seconds)}
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
        none = np.full(len(self.spans[everything]), -np.inf)
        self.allowed, self.alive = {everything: none.copy()}, {}
        self.allowed[everything][len(self.packing.spans[everything]) - 1] = self.limit
        count = 0
        for members in sorted(self.packing.cuts, key=lambda s: -s.bit_count()):
            if members not in self.allowed or members not in self.spans:
                continue
            mine = self.allowed[members]
            mine[mine * SLACK < self.spans[members]] = -np.inf
            if not (mine > 0).any():
                continue
            for cut in self._fitting(members, mine):
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

    def _fitting(self, members: int, mine: Floats) -> Iterator[Cut]:
        """The cuts whose packings are short enough."""
        cuts, lengths = self.packing.cuts[members]
        most = mine.reshape(self.prices.grains, -1).max(axis=0) * SLACK
        return (cuts[int(k)] for k in np.flatnonzero((lengths <= most).any(axis=1)))

    def _left_for(self, cut: Cut, mine: Floats) -> tuple[Floats, Floats]:
        """Most seconds for either part of a set that has so many."""
        first, second = self.spans[cut.first], self.spans[cut.second]
        at, p, q = self._in_turn(cut, mine)
        switch_s = self._switch(cut)
        one, other = np.full((2, len(mine)), -np.inf)
        np.maximum.at(one, p, mine[at] - second[q] - switch_s)
        np.maximum.at(other, q, mine[at] - first[p] - switch_s)
        at, p, q = self._beside(cut, mine)
        left = self._pipelined(mine)[at]
        np.maximum.at(one, p, left)
        np.maximum.at(other, q, left)
        return one, other

    def _add_up(self) -> None:
        """Lags and least seconds of every set that has a place, from single components up."""
        self.lags, packed, self.spans = {}, self.spans, {}
        for members in sorted(self.allowed, key=int.bit_count):
            mine = self.allowed[members]
            if members & (members - 1) == 0:
                seconds = np.where(packed[members] <= mine * SLACK, packed[members], np.inf)
                nothing = np.where(np.isfinite(seconds), 0.0, np.inf)
                step = self.prices.steps[members.bit_length() - 1].ravel() + nothing
                lags = np.stack([nothing, seconds, seconds, nothing, step, seconds])[:, None]
            elif members in self.alive:
                seconds = np.full(len(mine), np.inf)
                lags = np.full((6, members.bit_count(), len(mine)), np.inf)
                for cut in self.alive[members]:
                    if cut.first in self.lags and cut.second in self.lags:
                        self._compose_in_turn(cut, mine, seconds, lags)
                        self._compose_beside(cut, mine, seconds, lags)
            else:
                continue
            if np.isfinite(seconds).any():
                self.spans[members], self.lags[members] = seconds, lags

    def _compose_in_turn(self, cut: Cut, mine: Floats, seconds: Floats, lags: Floats) -> None:
        """Lower ``seconds`` and ``lags`` to those of the set cut so, its parts in turn."""
        at, p, q = self._in_turn(cut, mine)
        if len(at):
            switch_s = self._switch(cut)
            before, after = self.lags[cut.first][:, :, p], self.lags[cut.second][:, :, q]
            first, second = self.spans[cut.first][p], self.spans[cut.second][q]
            before[[START_TO_END, END_TO_END]] += second + switch_s
            after[[START, END]] += first + switch_s
            _lower(seconds, lags, at, first + second + switch_s, _joined(cut, before, after))

    def _compose_beside(self, cut: Cut, mine: Floats, seconds: Floats, lags: Floats) -> None:
        """As for parts in turn; at grain 0 the set may also be a pipeline of any grain."""
        at, p, q = self._beside(cut, mine)
        if not len(at):
            return
        both = _joined(cut, self.lags[cut.first][:, :, p], self.lags[cut.second][:, :, q])
        length = np.maximum(self.spans[cut.first][p], self.spans[cut.second][q])
        if cut.edge:
            length = np.maximum(length, self._wait(cut.first | cut.second, both))
        units = self.packing.spans[cut.first].shape[0]
        for where in (at, at % units):
            fits = np.flatnonzero(length <= mine[where] * SLACK)
            _lower(seconds, lags, where[fits], length[fits], both[:, :, fits])

    def _wait(self, members: int, lags: Floats) -> Floats:
        """Raise the lags of producers and consumers to one another's; and the seconds it takes.

        A consumer starts when its producer has done one micro-batch, and has one left to do when
        its producer ends.
        """
        inside = bits(members)
        place = {i: k for k, i in enumerate(inside)}
        start, start_to_end, end, end_to_end, step, run = lags
        for y, j in enumerate(inside):
            feeding = [place[i] for i in bits(self.model.pred[j] & members)]
            for x in feeding:
                np.maximum(start[y], start[x] + step[x], out=start[y])
                np.maximum(end[y], end[x] + step[y], out=end[y])
            np.maximum(end[y], start[y] + run[y], out=end[y])
        for x, i in reversed(list(enumerate(inside))):
            for y in (place[j] for j in bits(self.model.succ[i] & members)):
                np.maximum(start_to_end[x], step[x] + start_to_end[y], out=start_to_end[x])
                np.maximum(end_to_end[x], step[y] + end_to_end[y], out=end_to_end[x])
            np.maximum(start_to_end[x], run[x] + end_to_end[x], out=start_to_end[x])
        return np.asarray(np.maximum(start + start_to_end, end + end_to_end).max(axis=0))

    def _in_turn(self, cut: Cut, mine: Floats) -> tuple[Counts, Counts, Counts]:
        """States of the set, of its first part and of its second in which these fit in turn."""
        ways = ways_in_turn(self.prices.grains)
        first, second, whole = self._rows(cut, mine, ways)
        v, n = np.nonzero(first + second + self._switch(cut) <= whole * SLACK)
        units = whole.shape[1]
        return ways.whole[v] * units + n, ways.first[v] * units + n, ways.second[v] * units + n

    def _beside(self, cut: Cut, mine: Floats) -> tuple[Counts, Counts, Counts]:
        """The same side by side; of the set, the state within its pipeline."""
        single = [part & (part - 1) == 0 for part in (cut.first, cut.second)]
        ways = ways_beside(self.prices.grains, *single)
        first, second, whole = self._rows(cut, self._pipelined(mine), ways)
        units = whole.shape[1]
        v = np.flatnonzero(
            np.maximum(first.min(axis=1), second.min(axis=1)) <= whole.max(axis=1) * SLACK
        )
        n = np.flatnonzero((whole > 0).any(axis=0))
        k = np.flatnonzero(np.isfinite(first).any(axis=0))
        rest = n[:, None] - k
        other = np.where(rest > 0, second[v][:, rest], np.inf)
        long = np.maximum(first[v][:, None, k], other)
        a, b, c = np.nonzero(long <= whole[v][:, n, None] * SLACK)
        v, n, k = v[a], n[b], k[c]
        return ways.whole[v] * units + n, ways.first[v] * units + k, ways.second[v] * units + n - k

    def _rows(self, cut: Cut, mine: Floats, ways: Ways) -> tuple[Floats, Floats, Floats]:
        """Spans of both parts, and what the set may take, by way; shape (ways, units + 1)."""
        rows = (self.prices.grains, -1)
        first, second = self.spans[cut.first], self.spans[cut.second]
        return (
            first.reshape(rows)[ways.first],
            second.reshape(rows)[ways.second],
            mine.reshape(rows)[ways.whole],
        )

    def _pipelined(self, mine: Floats) -> Floats:
        """Most seconds as a pipeline of each grain, be it alone or part of a larger one."""
        rows = mine.reshape(self.prices.grains, -1)
        return np.asarray(np.maximum(rows, rows[0]).ravel())

    def _switch(self, cut: Cut) -> float:
        free = self.model.tight or not self.model.switching
        return 0.0 if free else self.model.switch(cut.first, cut.second)


def _joined(cut: Cut, before: Floats, after: Floats) -> Floats:
    """Lags of the members of both parts, in order."""
    order = np.argsort([*bits(cut.first), *bits(cut.second)])
    return np.concatenate([before, after], axis=1)[:, order]


def _lower(seconds: Floats, lags: Floats, at: Counts, length: Floats, values: Floats) -> None:
    """Lower those of the states ``at``, which may be there more than once."""
    if not len(at):
        return
    order = np.argsort(at, kind="stable")
    states, starts = np.unique(at[order], return_index=True)
    least = np.minimum.reduceat(length[order], starts)
    seconds[states] = np.minimum(seconds[states], least)
    lowest = np.minimum.reduceat(values[:, :, order], starts, axis=2)
    lags[:, :, states] = np.minimum(lags[:, :, states], lowest)

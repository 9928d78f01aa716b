"""Which consumer gets the next item: pure decisions, no clock and no I/O.

A policy sees every living consumer of a channel and the weight of the item at the head. It
names one. Naming a consumer which has not asked leaves the item where it is until something
changes: that is how `Adaptive` keeps a heavy item for a fast consumer about to be free.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from rlinf.channel.errors import PolicyUnknown

ENTRY_POINTS = "rlinf.policies"


@dataclass(frozen=True, slots=True)
class ConsumerLoad:
    """One consumer as a policy sees it, at the moment of the decision."""

    id: str
    capacity: float
    """Relative speed its owner declared; 1.0 unless said otherwise."""
    ready: bool
    """It has asked and can be given the item now."""
    outstanding_weight: float
    """Weight given and not yet acknowledged."""
    busy_s: float
    """Seconds since it began on what it holds; 0 when it holds nothing."""


@dataclass(frozen=True, slots=True)
class ItemLoad:
    """The item at the head as a policy sees it."""

    weight: float
    behind_weight: float
    """Weight of everything queued behind it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and why it won."""

    consumer: str
    because: str


class Policy(Protocol):
    """Balances one channel. Not shared between channels; called from one thread at a time."""

    def choose(self, consumers: Sequence[ConsumerLoad], item: ItemLoad) -> Choice:
        """Name the consumer for this item; at least one consumer is ready."""
        ...

    def completed(self, consumer: str, weight: float, seconds: float) -> None:
        """`consumer` acknowledged `weight` after working on it for `seconds`."""
        ...


class RoundRobin:
    """Each ready consumer in turn, whatever the weights."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, consumers: Sequence[ConsumerLoad], item: ItemLoad) -> Choice:
        """The ready consumer whose last turn is longest ago."""
        winner = min((c for c in consumers if c.ready), key=lambda c: self._turns.get(c.id, 0)).id
        self._turn += 1
        self._turns[winner] = self._turn
        return Choice(winner, "its turn is longest ago")

    def completed(self, consumer: str, weight: float, seconds: float) -> None:
        """Turns do not depend on completions."""


class LeastLoaded:
    """The ready consumer with the least outstanding weight; ties go to the first in line."""

    def choose(self, consumers: Sequence[ConsumerLoad], item: ItemLoad) -> Choice:
        """The least outstanding weight among the ready."""
        winner = min((c for c in consumers if c.ready), key=lambda c: c.outstanding_weight)
        return Choice(winner.id, f"least outstanding weight ({winner.outstanding_weight:g})")

    def completed(self, consumer: str, weight: float, seconds: float) -> None:
        """The outstanding weight already tells it."""


class Weighted:
    """Smooth weighted round robin over load, the default.

    Load is outstanding weight over capacity, this item included. Equal loads are settled by
    smooth weighted round robin (the algorithm of nginx's upstream balancer): every decision
    credits each consumer with its share of the item's weight and charges the winner with all of
    it, so that over time finished weight follows capacity without bursts.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, consumers: Sequence[ConsumerLoad], item: ItemLoad) -> Choice:
        """The least load; among equals the most credit."""
        weight = item.weight
        ready = [c for c in consumers if c.ready]
        total = sum(c.capacity for c in ready)
        credit = self._credit
        for consumer in ready:
            share = weight * consumer.capacity / total
            credit[consumer.id] = credit.get(consumer.id, 0.0) + share

        def load(consumer: ConsumerLoad) -> tuple[float, float]:
            waiting = consumer.outstanding_weight
            # An idle consumer's load is 0 whatever the item weighs: credit alone decides.
            over = (waiting + weight) / consumer.capacity if waiting else 0.0
            return over, -credit[consumer.id]

        winner = min(ready, key=load)
        credit[winner.id] -= weight
        if len(credit) > 2 * len(consumers) + 64:
            self._forget({c.id for c in consumers})
        return Choice(winner.id, f"least load ({winner.outstanding_weight:g} outstanding)")

    def completed(self, consumer: str, weight: float, seconds: float) -> None:
        """The outstanding weight already tells it."""

    def _forget(self, living: set[str]) -> None:
        for gone in [name for name in self._credit if name not in living]:
            del self._credit[gone]


class Adaptive:
    """Learns each consumer's rate from its completions and picks the earliest finish.

    Rate is weight over seconds, both summed up with a forgetting factor: so an item counts by the
    time it took, and the fixed cost of a small one hardly moves it. The predicted finish is
    what the consumer still has to do plus this item, over its rate. An item is kept for a busy
    consumer only where everything, what is queued behind it included, is predicted to end sooner
    that way: near the end of a backlog. Nobody waits for a consumer that is overdue.
    """

    memory = 0.8
    """How much the past counts for each item."""
    patience = 1.5
    """A consumer is overdue after this many times its predicted time."""

    def __init__(self) -> None:
        self._work: dict[str, tuple[float, float]] = {}
        self._rates: dict[str, float] = {}

    def choose(self, consumers: Sequence[ConsumerLoad], item: ItemLoad) -> Choice:
        """The earliest predicted finish; unknown rates are taken as the mean of the known."""
        known = [rate / c.capacity for c in consumers if (rate := self._rates.get(c.id))]
        default = sum(known) / len(known) if known else 1.0
        rates = [self._rates.get(c.id) or default * c.capacity for c in consumers]
        work_s = [c.outstanding_weight / rate for c, rate in zip(consumers, rates, strict=True)]
        left_s = [max(w - c.busy_s, 0.0) for c, w in zip(consumers, work_s, strict=True)]
        finish_s = [left + item.weight / rate for left, rate in zip(left_s, rates, strict=True)]
        ready = min((i for i, c in enumerate(consumers) if c.ready), key=finish_s.__getitem__)
        in_time = [c.busy_s <= self.patience * w for c, w in zip(consumers, work_s, strict=True)]
        busy = [i for i, c in enumerate(consumers) if not c.ready and work_s[i] and in_time[i]]
        best = ready
        if known and busy:
            fast = min(busy, key=finish_s.__getitem__)
            others = [i for i in range(len(consumers)) if i != ready]
            rate = sum(rates[i] for i in others)
            rest = item.behind_weight + sum(left_s[i] * rates[i] for i in others)
            at_once = max(finish_s[ready], rest / rate)
            kept = max(finish_s[fast], (rest + item.weight) / rate)
            best = fast if kept < at_once else ready
        return Choice(consumers[best].id, f"earliest finish (in {finish_s[best]:.3g} s)")

    def completed(self, consumer: str, weight: float, seconds: float) -> None:
        """Fold one observation into the rate."""
        if seconds > 0:
            old_weight, old_seconds = self._work.get(consumer, (0.0, 0.0))
            work = self.memory * old_weight + weight, self.memory * old_seconds + seconds
            self._work[consumer] = work
            self._rates[consumer] = work[0] / work[1]


BUILT_IN: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "weighted": Weighted,
}


def make_policy(name: str) -> Policy:
    """A fresh policy by name: built in, or an entry point of the group ``rlinf.policies``."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in plugins:
        policy: Policy = plugins[name].load()()
        return policy
    known = sorted({*BUILT_IN, *plugins})
    near = difflib.get_close_matches(name, known, n=1)
    raise PolicyUnknown(name, known, near[0] if near else None)

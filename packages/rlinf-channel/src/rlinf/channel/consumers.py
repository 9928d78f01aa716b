"""The consumers' side of the queue: who holds what, since when, and how fast each one is."""

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlinf.channel.journal import REMEMBERED_RUNS
from rlinf.channel.messages import ClientId, Recall, Take
from rlinf.channel.policy import ConsumerLoad
from rlinf.channel.run import Run
from rlinf.channel.spans import Ranges, RunMap, Spans, length
from rlinf.channel.statistics import ConsumerStatistics

_RATE_SMOOTHING = 0.3
RECALL_AFTER_S = 0.005
"""A consumer which was given more than it asked for keeps that for so long before others, who wait
with nothing to do, may ask for it. If they get nothing they ask again, four times as late."""
RECALL_AT_MOST_S = 1.0


class _Delivery(NamedTuple):
    first: int
    last: int
    ask: int
    at: float


class Consumer:
    """One consumer and what it holds, by tag in the order given."""

    __slots__ = (
        "answered",
        "brought",
        "busy_since",
        "capacity",
        "deliveries",
        "expires_at",
        "finished_items",
        "finished_weight",
        "id",
        "idle_s",
        "idle_since",
        "leased",
        "name",
        "rate",
        "recall_at",
        "recall_in_s",
        "redelivered",
        "seen_at",
        "weight",
    )

    def __init__(self, client: ClientId, now: float) -> None:
        self.id = client
        self.name = str(client)
        self.capacity = 1.0
        self.leased = RunMap()
        self.deliveries: deque[_Delivery] = deque()
        """Of which something is leased still; the latest last."""
        self.answered = -1
        """The latest of its requests that was answered with items."""
        self.weight = 0.0
        self.seen_at = self.idle_since = self.busy_since = now
        self.expires_at = now
        self.idle_s = 0.0
        self.finished_items = 0
        self.finished_weight = 0.0
        self.redelivered = 0
        self.rate: float | None = None
        self.brought = False
        """It was given more than it asked for, since it last held nothing."""
        self.recall_at = now
        self.recall_in_s = 0.0

    def load(self, ready: bool, now: float) -> ConsumerLoad:
        """The view a policy gets."""
        busy_s = now - self.busy_since if self.leased else 0.0
        return ConsumerLoad(self.name, self.capacity, ready, self.weight, busy_s)

    def give(self, tag: int, runs: Sequence[Run], ask: int, now: float) -> int:
        """Hand out runs, tagged from `tag` on, in answer to the consumer's request `ask`; the tag
        behind the last.
        """
        if not self.leased:
            self.idle_s += now - self.idle_since
            self.busy_since = now
        self.answered = max(self.answered, ask)
        first = tag
        for run in runs:
            self.leased.add(tag, run)
            self.weight += run.weight
            tag += run.count
        deliveries = self.deliveries
        while deliveries and (not self.leased or deliveries[0].last < self.leased.first):
            deliveries.popleft()
        deliveries.append(_Delivery(first, tag - 1, ask, now))
        return tag

    def unknown_to(self, tags: Ranges, asks: Ranges, before: float) -> Ranges:
        """What it holds and has not listed in `tags`, although it must have arrived: it was given
        before that time, and in answer to none of `asks`.
        """
        unknown = Spans(self.leased.ranges())
        unknown.difference_update(tags)
        if unknown:
            waited = Spans(asks)
            for d in self.deliveries:
                if d.at >= before or waited.common((d.ask, d.ask)):
                    unknown.remove(d.first, d.last)
        return unknown.ranges()

    def take_back(self, tags: Ranges, now: float) -> tuple[list[Run], Ranges]:
        """Remove what it holds of these tags: the runs, and which tags they are."""
        runs, found = self.leased.cut(tags)
        if runs:
            if self.leased:
                self.weight -= sum([run.weight for run in runs])
            else:
                self.weight = 0.0
                self.idle_since = now
                self.brought = False
        return runs, found

    def finish(self, runs: Sequence[Run], now: float) -> tuple[float, float]:
        """Note items worked off; their weight and the seconds they took."""
        weight = sum([run.weight for run in runs])
        seconds = now - self.busy_since
        self.busy_since = now
        self.finished_items += sum([run.count for run in runs])
        self.finished_weight += weight
        if seconds > 0:
            rate = weight / seconds
            old = self.rate
            self.rate = rate if old is None else old + _RATE_SMOOTHING * (rate - old)
        return weight, seconds

    def bring(self, now: float) -> None:
        """It was given more than it asked for."""
        self.brought = True
        self.recall_in_s = RECALL_AFTER_S
        self.recall_at = now + RECALL_AFTER_S

    def statistics(self, now: float) -> ConsumerStatistics:
        """A frozen picture."""
        return ConsumerStatistics(
            id=self.name,
            capacity=self.capacity,
            leased_items=self.leased.count,
            outstanding_weight=self.weight,
            finished_items=self.finished_items,
            finished_weight=self.finished_weight,
            weight_per_s=self.rate or 0.0,
            idle_s=self.idle_s if self.leased else self.idle_s + now - self.idle_since,
            redelivered=self.redelivered,
        )


class Consumers:
    """All consumers of one channel. Tags are unique for each delivery, never reused."""

    def __init__(self, lease_s: float, first_tag: int = 0) -> None:
        self._lease_s = lease_s
        self._tags = first_tag
        self.settled: dict[ClientId, Spans] = {}
        """The latest tags each consumer has settled, where that must outlive the server."""
        self.known: dict[ClientId, Consumer] = {}
        self.leased_items = 0

    @property
    def busy(self) -> int:
        """How many hold something."""
        return sum([1 for consumer in self.known.values() if consumer.leased])

    def see(self, client: ClientId, now: float) -> Consumer:
        """The consumer, new or known; being seen renews its lease."""
        consumer = self.known.get(client)
        if consumer is None:
            self.forget_strangers(now)
            consumer = self.known[client] = Consumer(client, now)
        consumer.seen_at = now
        consumer.expires_at = now + self._lease_s
        return consumer

    def give(self, take: Take, consumer: Consumer, runs: Sequence[Run], now: float) -> int:
        """Lease runs out in answer to a request; the tag of the first item."""
        first = self._tags
        self._tags = consumer.give(first, runs, take.ask, now)
        consumer.expires_at = now + self._lease_s
        self.leased_items += self._tags - first
        return first

    def take_back(self, consumer: Consumer, tags: Ranges, now: float) -> tuple[list[Run], Ranges]:
        """End the lease of these tags, as far as the consumer still held them: runs and tags."""
        runs, found = consumer.take_back(tags, now)
        self.leased_items -= length(found)
        return runs, found

    def missing(self, client: ClientId, tags: Ranges) -> int:
        """How many of these tags the consumer does not hold."""
        known = self.known.get(client)
        return known.leased.missing(tags) if known else length(tags)

    def unsettled(self, client: ClientId, tags: Ranges) -> int:
        """How many of them it neither holds nor has settled with the server before this one."""
        settled = self.settled.get(client)
        return self.missing(client, tags) - (settled.common(tags) if settled else 0)

    def remember(self, client: ClientId, tags: Ranges) -> None:
        """These were settled: a restarted server, asked again, must say the same."""
        settled = self.settled.setdefault(client, Spans())
        settled.update(tags)
        settled.keep_latest(REMEMBERED_RUNS)

    def recall(self, waiting: Collection[Take], now: float) -> tuple[list[Recall], float]:
        """Others wait while somebody sits on items brought along: ask for them back.

        Also says when to look again.
        """
        asking = {take.consumer for take in waiting}
        recalls: list[Recall] = []
        again_at = math.inf
        for consumer in self.known.values():
            if not consumer.brought or not consumer.leased or consumer.id in asking:
                continue
            if consumer.recall_at <= now:
                recalls.append(Recall(consumer.id))
                consumer.recall_in_s = min(4 * consumer.recall_in_s, RECALL_AT_MOST_S)
                consumer.recall_at = now + consumer.recall_in_s
            again_at = min(again_at, consumer.recall_at)
        return recalls, again_at

    def loads(self, asking: Collection[str], now: float) -> list[ConsumerLoad]:
        """What a policy chooses from: those which hold something, and those which ask."""
        known = self.known.values()
        return [c.load(c.name in asking, now) for c in known if c.leased or c.name in asking]

    def awaited(self, take: Take) -> bool:
        """Whether items may come back which whoever asks does not hold, or not that it knows."""
        mine = self.known.get(take.consumer)
        leased = mine.leased.count if mine else 0
        return self.leased_items > leased or (take.holds is not None and leased > take.holds)

    def expired(self, now: float) -> list[Consumer]:
        """Those which hold something and have shown no sign of life for too long."""
        return [c for c in self.known.values() if c.leased and c.expires_at <= now]

    def of(self, worker: str, epoch: int) -> list[Consumer]:
        """Every consumer in one incarnation of a worker."""
        return [c for c in self.known.values() if c.id.worker == worker and c.id.epoch == epoch]

    def forget_strangers(self, now: float) -> None:
        """Drop those long silent which hold nothing, so that short-lived ones do not pile up."""
        silent_s = 20 * self._lease_s
        old = [c for c in self.known.values() if not c.leased and now - c.seen_at > silent_s]
        for consumer in old:
            del self.known[consumer.id]

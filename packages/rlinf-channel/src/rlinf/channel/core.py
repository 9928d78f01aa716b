"""The queue behind one channel: pure decisions. No clock, no thread, no I/O.

`Queue.step(event, now)` is the only way in. Guarantees, each checked by `rlinf.channel.testing`:

- First in, first out for each key of each producer, as long as nothing is redelivered.
- At least once: an item leaves only when a consumer settles it. One that is returned, or whose
  consumer is lost or silent for too long, takes its old place at the front again.
- Each numbered item is taken in once, however often its message arrives, in any order.
- Bounds hold at every moment; who has no room waits in line until its deadline.
- A request that ends without delivery has taken nothing.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from rlinf.channel.config import ChannelConfig
from rlinf.channel.consumers import Consumer, Consumers
from rlinf.channel.intake import Intake
from rlinf.channel.lane import TOLERANCE, Lane, Lanes, batch
from rlinf.channel.messages import (
    Attach,
    Cancel,
    ClientId,
    Close,
    Command,
    Delivered,
    Event,
    Gone,
    Item,
    Outcome,
    Put,
    Recall,
    Recalled,
    Refusal,
    Refused,
    Released,
    Renew,
    Settle,
    Settled,
    Take,
    Tick,
)
from rlinf.channel.policy import ItemLoad, Policy, make_policy
from rlinf.channel.statistics import ChannelStatistics

RECALL_AFTER_S = 0.005
"""A consumer which was given more than it asked for keeps that for so long before others, who wait
with nothing to do, may ask for it. If they get nothing they ask again, four times as late."""
RECALL_AT_MOST_S = 1.0
HOLD_RECHECK_S = 0.05
"""How often an item that a policy keeps for a busy consumer is considered again."""
PREFETCH_BYTES = 8 * 2**20
"""One delivery brings along about as much as this, reckoned by the usual size of an item."""


class Queue:
    """One channel. Not thread-safe: its owner serialises the steps."""

    def __init__(self, name: str, config: ChannelConfig, policy: Policy | None = None) -> None:
        self.name = name
        self.config = config
        self.wake_at = math.inf
        """The next time a `Tick` can matter: never too late, sometimes too early."""
        self._policy = policy or make_policy(config.type)
        self._lanes = Lanes()
        self._intake = Intake(config)
        self._consumers = Consumers(config.lease_s)
        self._waiting: dict[int, Take] = {}
        self._acknowledged = self._rejected = self._redelivered = 0
        self._returned = 0
        """Items that went back and are queued again (or more, never less)."""
        self._handlers: dict[type, Callable[..., list[Command]]] = {
            Put: self._on_put,
            Take: self._on_take,
            Settle: self._on_settle,
            Renew: self._on_renew,
            Attach: self._on_attach,
            Recalled: self._on_recalled,
            Gone: self._on_gone,
            Cancel: self._on_cancel,
            Close: self._on_close,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Command]:
        """Take one event in; what to answer to whom."""
        commands = self._handlers[type(event)](event, now)
        self._settle_down(commands, now)
        return commands

    @property
    def closed(self) -> bool:
        """No more puts."""
        return self._intake.closed

    @property
    def drained(self) -> bool:
        """Nothing queued, nothing leased, nothing waiting for room."""
        return not (self._lanes or self._consumers.leased_items or self._intake.line)

    @property
    def held_bytes(self) -> int:
        """Bytes of everything queued and leased."""
        return self._intake.held_bytes

    def __len__(self) -> int:
        return len(self._lanes)

    def missing(self, consumer: ClientId, tags: Iterable[int]) -> int:
        """How many of these tags the consumer does not hold."""
        known = self._consumers.known.get(consumer)
        leased = known.leased if known else {}
        return sum(tag not in leased for tag in tags)

    def seen(self, producer: ClientId, number: int) -> bool:
        """Whether this producer's number has arrived before."""
        return self._intake.seen(producer, number)

    def statistics(self, now: float) -> ChannelStatistics:
        """A frozen picture."""
        return ChannelStatistics(
            name=self.name,
            policy=self.config.type,
            max_items=self.config.max_items,
            max_bytes=self.config.buffer_bytes,
            depth=len(self._lanes),
            leased_items=self._consumers.leased_items,
            held_bytes=self._intake.held_bytes,
            put_items=self._intake.admitted,
            put_bytes=self._intake.admitted_bytes,
            acknowledged_items=self._acknowledged,
            rejected_items=self._rejected,
            redelivered_items=self._redelivered,
            duplicate_items=self._intake.duplicates,
            waiting_producers=len(self._intake.line),
            waiting_consumers=len(self._waiting),
            closed=self.closed,
            consumers=tuple(c.statistics(now) for c in self._consumers.known.values()),
        )

    # What each event does

    def _on_put(self, put: Put, now: float) -> list[Command]:
        commands = self._intake.receive(put)
        if put.deadline is not None:
            self.wake_at = min(self.wake_at, put.deadline)
        return commands

    def _on_take(self, take: Take, now: float) -> list[Command]:
        consumer = self._consumers.see(take.consumer, now)
        self._finish(consumer, take.done, Outcome.DONE, now)
        if not take.wait:
            return [self._give(take, self._pick(take) if self._ready(take) else 0, now)]
        self._waiting[take.request] = take
        if take.deadline is not None:
            self.wake_at = min(self.wake_at, take.deadline)
        return []

    def _on_settle(self, settle: Settle, now: float) -> list[Command]:
        consumer = self._consumers.see(settle.consumer, now)
        lost = self._finish(consumer, settle.tags, settle.outcome, now)
        return [] if settle.request is None else [Settled(settle.request, lost)]

    def _on_renew(self, renew: Renew, now: float) -> list[Command]:
        consumer = self._consumers.see(renew.consumer, now)
        lost = self.missing(renew.consumer, renew.tags)
        commands: list[Command] = []
        if now - consumer.granted_at > self.config.lease_s / 2:
            unknown = tuple(set(consumer.leased) - set(renew.tags))
            commands += self._take_from(consumer, unknown, now, expired=True)
        if renew.request is not None:
            commands.append(Settled(renew.request, lost))
        return commands

    def _on_attach(self, attach: Attach, now: float) -> list[Command]:
        self._consumers.see(attach.consumer, now).capacity = attach.capacity
        return []

    def _on_recalled(self, recalled: Recalled, now: float) -> list[Command]:
        consumer = self._consumers.see(recalled.consumer, now)
        items = self._consumers.take_back(consumer, recalled.tags, now)
        self._lanes.restore(items)  # never begun, so giving it to another is no redelivery
        return []

    def _on_gone(self, gone: Gone, now: float) -> list[Command]:
        commands: list[Command] = []
        for consumer in self._consumers.of(gone.worker, gone.epoch):
            commands += self._release(consumer, now, expired=False)
            del self._consumers.known[consumer.id]
        self._intake.forget(gone.worker, gone.epoch)
        dead = [t for t in self._waiting.values() if t.consumer[:2] == (gone.worker, gone.epoch)]
        for take in dead:
            del self._waiting[take.request]
            commands.append(Refused(take.request, Refusal.CANCELLED))
        return commands

    def _on_cancel(self, cancel: Cancel, now: float) -> list[Command]:
        if self._waiting.pop(cancel.request, None):
            return [Refused(cancel.request, Refusal.CANCELLED)]
        return self._intake.cancel(cancel.request)

    def _on_close(self, close: Close, now: float) -> list[Command]:
        commands = self._intake.close()
        if close.request is not None:
            commands.append(Settled(close.request))
        return commands

    def _on_tick(self, tick: Tick, now: float) -> list[Command]:
        commands: list[Command] = []
        late = [t for t in self._waiting.values() if t.deadline is not None and t.deadline <= now]
        for take in late:
            del self._waiting[take.request]
            commands.append(Refused(take.request, Refusal.TIMEOUT))
        commands += self._intake.expire(now)
        for consumer in self._consumers.expired(now):
            commands += self._release(consumer, now, expired=True)
        self.wake_at = self._deadline()
        return commands

    # What follows from every event

    def _settle_down(self, commands: list[Command], now: float) -> None:
        while True:
            if self._intake.line:
                commands += self._intake.admit(self._lanes)
            if not (self._waiting and self._deliver(commands, now) and self._intake.line):
                break
        if self._waiting:
            if self.closed and not self._intake.line:
                self._end(commands)
            if not self._lanes:
                self._recall(commands, now)

    def _deliver(self, commands: list[Command], now: float) -> bool:
        """Give out what can be given; whether anything was."""
        given = False
        while self._lanes and self._waiting:
            ready = [take for take in self._waiting.values() if self._ready(take)]
            take = self._choose(ready, now) if ready else None
            if take is None:
                break
            del self._waiting[take.request]
            commands.append(self._give(take, self._pick(take), now))
            given = True
        return given

    def _ready(self, take: Take) -> bool:
        """Whether this request can be met with what is queued."""
        lane = self._lanes.get(take.key)
        if not lane:
            return False
        # A bound that is reached before the batch is complete would wait for ever: give what fits.
        bounded = take.max_items is not None or take.target_weight is not None
        if not take.full or (self.closed and not self._intake.line):
            return True
        if bounded and self._intake.line:
            return True
        if take.max_items is not None and len(lane) >= take.max_items:
            return True
        if take.target_weight is None or lane.weight < take.target_weight * (1 - 2 * TOLERANCE):
            return False
        return batch(lane, take.max_items, take.target_weight)[1]

    def _pick(self, take: Take) -> int:
        """How many items a request which is ready gets, from the front of its lane."""
        lane = self._lanes.get(take.key)
        if not lane:
            return 0
        if take.full:
            count = batch(lane, take.max_items, take.target_weight)[0]
            if not take.along or count != take.max_items:
                return count
            more = min(self._share(lane), count + take.along)
            return max(count, more // count * count)
        if take.max_items == 1 or len(lane) == 1:
            return 1
        share = self._share(lane)
        return share if take.max_items is None else min(share, take.max_items)

    def _share(self, lane: Lane) -> int:
        """How many items one request may bring along: its part, and not too many bytes."""
        busy = sum(1 for consumer in self._consumers.known.values() if consumer.leased)
        share = math.ceil(len(lane) / max(1, busy, len(self._waiting)))
        usual = self._intake.held_bytes / (len(self._lanes) + self._consumers.leased_items)
        return max(1, min(share, int(PREFETCH_BYTES / max(usual, 1.0))))

    def _choose(self, ready: list[Take], now: float) -> Take | None:
        """The request to serve next by the policy, or None if the item waits for a busy one."""
        asking: dict[str, Take] = {}
        for take in ready:
            asking.setdefault(str(take.consumer), take)
        loads = [
            consumer.load(consumer.name in asking, now)
            for consumer in self._consumers.known.values()
            if consumer.leased or consumer.name in asking
        ]
        lane = self._lanes.get(ready[0].key)
        assert lane is not None
        weight = lane.head().weight
        choice = self._policy.choose(loads, ItemLoad(weight, lane.weight - weight))
        chosen = asking.get(choice.consumer)
        if chosen is None:
            self.wake_at = min(self.wake_at, now + HOLD_RECHECK_S)
        return chosen

    def _give(self, take: Take, count: int, now: float) -> Delivered:
        items = self._lanes.take_first(count, take.key) if count else []
        consumer = self._consumers.see(take.consumer, now)
        if self._returned:
            again = sum([item.returns > 0 for item in items])
            consumer.redelivered += again
            self._returned = max(0, self._returned - again)
        tag = self._consumers.give(consumer, items, now)
        asked = (take.max_items or len(items)) if take.full else int(take.wait)
        if len(items) > asked:
            consumer.brought = True
            consumer.recall_in_s = RECALL_AFTER_S
            consumer.recall_at = now + RECALL_AFTER_S
        self.wake_at = min(self.wake_at, consumer.expires_at)
        return Delivered(take.request, take.consumer, tag, items)

    def _end(self, commands: list[Command]) -> None:
        """Closed and nothing left to hope for: tell those who still ask."""
        for take in list(self._waiting.values()):
            left = self._lanes.get(take.key)
            if not left and not self._consumers.held_by_others(take.consumer):
                del self._waiting[take.request]
                commands.append(Refused(take.request, Refusal.CLOSED))

    def _recall(self, commands: list[Command], now: float) -> None:
        """Others wait while somebody sits on items brought along: ask for them back."""
        if not self._consumers.leased_items:
            return
        asking = {take.consumer for take in self._waiting.values()}
        for consumer in self._consumers.known.values():
            if not consumer.brought or not consumer.leased or consumer.id in asking:
                continue
            if consumer.recall_at <= now:
                commands.append(Recall(consumer.id))
                consumer.recall_in_s = min(4 * consumer.recall_in_s, RECALL_AT_MOST_S)
                consumer.recall_at = now + consumer.recall_in_s
            self.wake_at = min(self.wake_at, consumer.recall_at)

    def _finish(self, consumer: Consumer, tags: Sequence[int], outcome: Outcome, now: float) -> int:
        """Settle tags; how many of them the consumer did not hold."""
        items = self._consumers.take_back(consumer, tags, now)
        if outcome is Outcome.RETURNED:
            self._restore(items)
        elif items:
            self._intake.held_bytes -= sum([item.nbytes for item in items])
            weight, seconds = consumer.finish(items, now)
            self._policy.completed(consumer.name, weight, seconds)
            if outcome is Outcome.DONE:
                self._acknowledged += len(items)
            else:
                self._rejected += len(items)
        return len(tags) - len(items)

    def _release(self, consumer: Consumer, now: float, *, expired: bool) -> list[Command]:
        return self._take_from(consumer, tuple(consumer.leased), now, expired=expired)

    def _take_from(
        self, consumer: Consumer, tags: tuple[int, ...], now: float, *, expired: bool
    ) -> list[Command]:
        self._restore(self._consumers.take_back(consumer, tags, now))
        return [Released(consumer.id, tags, expired)] if tags else []

    def _restore(self, items: list[Item]) -> None:
        self._redelivered += len(items)
        self._returned += len(items)
        for item in items:
            item.returns += 1
        self._lanes.restore(items)

    def _deadline(self) -> float:
        times = [take.deadline for take in self._waiting.values() if take.deadline is not None]
        times += [c.expires_at for c in self._consumers.known.values() if c.leased]
        line = self._intake.deadline()
        return min(times + ([] if line is None else [line]), default=math.inf)

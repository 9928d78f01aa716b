"""The queue behind one channel: pure decisions. No clock, no thread, no I/O.

`Queue.step(event, now)` is the only way in. Guarantees, each checked by `rlinf.channel.testing`:

- First in, first out for each key of each producer, as long as nothing is redelivered.
- At least once: an item leaves only when a consumer settles it. One that is returned, or whose
  consumer is lost or silent for too long, takes its old place at the front again.
- Each numbered item is taken in once, however often its message arrives, in any order.
- Bounds hold at every moment; who has no room waits in line until its deadline, or until it is
  certain that nobody will make room.
- A request that ends without delivery has taken nothing.
- An item that came back `max_deliveries` times is kept aside. One that came back half as often is
  given out alone, so that its neighbours do not share its fate.
"""

import math
from collections.abc import Callable

from rlinf.channel.config import ChannelConfig
from rlinf.channel.consumers import Consumer, Consumers
from rlinf.channel.dead import DeadLetters
from rlinf.channel.intake import Intake
from rlinf.channel.journal import Finished, Record
from rlinf.channel.lane import Lanes
from rlinf.channel.messages import (
    Attach,
    Buried,
    Cancel,
    ClientId,
    Close,
    Command,
    Delivered,
    Event,
    Gone,
    Left,
    Outcome,
    Put,
    Recalled,
    Refusal,
    Refused,
    Released,
    Renew,
    Resume,
    Settle,
    Settled,
    Take,
    Tick,
)
from rlinf.channel.picture import picture
from rlinf.channel.policy import ItemLoad, Policy, make_policy
from rlinf.channel.portion import Portions
from rlinf.channel.run import Run
from rlinf.channel.spans import Ranges, length, orders_of
from rlinf.channel.standstill import STANDSTILL_S, stands_still
from rlinf.channel.statistics import ChannelStatistics

HOLD_RECHECK_S = 0.05
"""How often an item that a policy keeps for a busy consumer is considered again."""


class Queue:
    """One channel. Not thread-safe: its owner serialises the steps.

    Args:
        name: Its name.
        config: Its configuration.
        policy: None: the one that the configuration names.
        birth: Tells it from other channels of this name.
        first_tag: Tags count up from here, so that those of one server are not taken for those of
            the next.
        journal: Where to append what must outlive the server; None: nothing must.
    """

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        policy: Policy | None = None,
        *,
        birth: int = 0,
        first_tag: int = 0,
        journal: list[Record] | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.birth = birth
        self.wake_at = math.inf
        """The next time a `Tick` can matter: never too late, sometimes too early."""
        self._policy = policy or make_policy(config.type)
        self._lanes = Lanes()
        self._portions = Portions(config.max_deliveries)
        self._journal = journal
        self._intake = Intake(name, config, journal)
        self._consumers = Consumers(config.lease_s, first_tag)
        self.dead = DeadLetters(config.buffer_bytes)
        self._waiting: dict[int, Take] = {}
        self._moved_at = 0.0
        """When something last was let in, given out or settled while a put waited for room."""
        self._acknowledged = self._rejected = self._redelivered = 0
        self._handlers: dict[type, Callable[..., list[Command]]] = {
            Put: self._on_put,
            Take: self._on_take,
            Settle: self._on_settle,
            Renew: self._on_renew,
            Attach: self._on_attach,
            Recalled: self._on_recalled,
            Resume: lambda resume, now: self._intake.resume(resume),
            Gone: self._on_gone,
            Cancel: self._on_cancel,
            Close: self._on_close,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Command]:
        """Take one event in; what to answer to whom."""
        self._settle_down(commands := self._handlers[type(event)](event, now), now)
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

    @property
    def held(self) -> int:
        """Items queued and leased."""
        return len(self._lanes) + self._consumers.leased_items

    def __len__(self) -> int:
        return len(self._lanes)

    def missing(self, consumer: ClientId, tags: Ranges) -> int:
        """How many of these tags the consumer does not hold."""
        return self._consumers.missing(consumer, tags)

    def expects(self, producer: ClientId) -> int:
        """The next number of a producer."""
        return self._intake.expects(producer)

    def statistics(self, now: float) -> ChannelStatistics:
        """A frozen picture."""
        return picture(self, now)

    # What each event does

    def _on_put(self, put: Put, now: float) -> list[Command]:
        if not self._intake.line:
            self._moved_at = now
        commands = self._intake.receive(put)
        if put.deadline is not None:
            self.wake_at = min(self.wake_at, put.deadline)
        return commands

    def _on_take(self, take: Take, now: float) -> list[Command]:
        consumer = self._consumers.see(take.consumer, now)
        commands = self._finish(consumer, take.done, Outcome.DONE, now)
        if not take.wait:
            count = self._pick(take) if self._ready(take) else 0
            return [*commands, self._give(take, count, now)]
        self._waiting[take.request] = take
        if take.deadline is not None:
            self.wake_at = min(self.wake_at, take.deadline)
        return commands

    def _on_settle(self, settle: Settle, now: float) -> list[Command]:
        consumer = self._consumers.see(settle.consumer, now)
        lost = self._consumers.unsettled(settle.consumer, settle.tags)
        commands = self._finish(consumer, settle.tags, settle.outcome, now)
        return commands if settle.request is None else [*commands, Settled(settle.request, lost)]

    def _on_renew(self, renew: Renew, now: float) -> list[Command]:
        consumer = self._consumers.see(renew.consumer, now)
        lost = self.missing(renew.consumer, renew.tags)
        commands: list[Command] = []
        before = now - self.config.lease_s / 2
        if unknown := consumer.unknown_to(renew.tags, renew.asks, before):
            commands += self._take_from(consumer, unknown, now, expired=True)
        if renew.request is not None:
            commands.append(Settled(renew.request, lost))
        return commands

    def _on_attach(self, attach: Attach, now: float) -> list[Command]:
        self._consumers.see(attach.consumer, now).capacity = attach.capacity
        return []

    def _on_recalled(self, recalled: Recalled, now: float) -> list[Command]:
        consumer = self._consumers.see(recalled.consumer, now)
        self._lanes.restore(self._take_back(consumer, recalled.tags, now)[0])  # no redelivery
        return []

    def _on_gone(self, gone: Gone, now: float) -> list[Command]:
        commands: list[Command] = []
        for consumer in self._consumers.of(gone.worker, gone.epoch):
            if held := consumer.leased.ranges():
                commands += self._take_from(consumer, held, now, expired=False)
            del self._consumers.known[consumer.id]
            self._consumers.settled.pop(consumer.id, None)
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
            commands += self._take_from(consumer, consumer.leased.ranges(), now, expired=True)
        self.wake_at = self._deadline()
        return commands

    # What follows from every event

    def _settle_down(self, commands: list[Command], now: float) -> None:
        while True:
            if self._intake.line:
                commands += self._admit(now)
            given = bool(self._waiting) and self._deliver(commands, now)
            if not self._intake.line or not (given or self._refuse_in_vain(commands, now)):
                break
        if self._waiting:
            if self.closed and not self._intake.line:
                self._end(commands)
            if not self._lanes and self._consumers.leased_items:
                recalls, again_at = self._consumers.recall(self._waiting.values(), now)
                commands += recalls
                self.wake_at = min(self.wake_at, again_at)

    def _admit(self, now: float) -> list[Command]:
        before = self._intake.admitted
        commands = self._intake.admit(self._lanes, self._consumers.leased_items)
        if self._intake.admitted > before:
            self._moved_at = now
        return commands

    def _refuse_in_vain(self, commands: list[Command], now: float) -> bool:
        """Refuse the first put of the line if it can never be let in; whether it was."""
        known, waiting = self._consumers.known.values(), self._waiting.values()
        if not stands_still(known, waiting, queued=len(self._lanes) > 0):
            return False
        if now < (due := self._moved_at + STANDSTILL_S):
            self.wake_at = min(self.wake_at, due)
            return False
        commands += self._intake.refuse_first()
        return True

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
            self._moved_at, given = now, True
        return given

    def _ready(self, take: Take) -> bool:
        """Whether this request can be met with what is queued."""
        lane, crowded = self._lanes.get(take.key), bool(self._intake.line)
        last = self.closed and not crowded
        return (
            lane is not None
            and len(lane) > 0
            and self._portions.ready(take, lane, last=last, crowded=crowded)
        )

    def _pick(self, take: Take) -> int:
        """How many items a request which is ready gets."""
        lane = self._lanes.get(take.key)
        if not lane or (take.max_items == 1 and not take.full):
            return 1 if lane else 0
        sharers = max(self._consumers.busy, len(self._waiting))
        return self._portions.pick(take, lane, sharers, self._intake.held_bytes / self.held)

    def _choose(self, ready: list[Take], now: float) -> Take | None:
        """The request to serve next by the policy, or None if the item waits for a busy one."""
        asking: dict[str, Take] = {}
        for take in ready:
            asking.setdefault(str(take.consumer), take)
        loads = self._consumers.loads(asking, now)
        lane = self._lanes.get(ready[0].key)
        assert lane is not None
        weight = lane.head().weigh(1)
        choice = self._policy.choose(loads, ItemLoad(weight, lane.weight - weight))
        chosen = asking.get(choice.consumer)
        if chosen is None:
            self.wake_at = min(self.wake_at, now + HOLD_RECHECK_S)
        return chosen

    def _give(self, take: Take, count: int, now: float) -> Delivered:
        runs = self._lanes.take_first(count, take.key) if count else []
        consumer = self._consumers.see(take.consumer, now)
        if self._portions.returned:
            again = sum([run.count for run in runs if run.returns])
            consumer.redelivered += again
            self._portions.returned = max(0, self._portions.returned - again)
        tag = self._consumers.give(take, consumer, runs, now)
        if count > take.wait * ((take.max_items or count) if take.full else 1):
            consumer.bring(now)
        self.wake_at = min(self.wake_at, consumer.expires_at)
        copies = [run.copy() for run in runs]  # what becomes of these here is not their affair
        return Delivered(take.request, take.consumer, tag, copies, self.held)

    def _end(self, commands: list[Command]) -> None:
        """Closed and nothing left to hope for: tell those who still ask."""
        for take in list(self._waiting.values()):
            left = self._lanes.get(take.key)
            if not left and not self._consumers.awaited(take):
                del self._waiting[take.request]
                commands.append(Refused(take.request, Refusal.CLOSED))

    def _finish(
        self, consumer: Consumer, tags: Ranges, outcome: Outcome, now: float
    ) -> list[Command]:
        """Settle tags, as far as the consumer holds them."""
        runs, found = self._take_back(consumer, tags, now)
        if outcome is Outcome.RETURNED:
            return self._restore(consumer, runs)
        if runs:
            self._intake.held_bytes -= sum([run.nbytes for run in runs])
            weight, seconds = consumer.finish(runs, now)
            self._policy.completed(consumer.name, weight, seconds)
            if outcome is Outcome.DONE:
                self._acknowledged += length(found)
            else:
                self._rejected += length(found)
            if self._journal is not None:
                gone = orders_of(runs)
                self._journal.append(Finished(self.name, consumer.id, found, gone, outcome))
                self._consumers.remember(consumer.id, found)
            if not self.config.offload_to_cpu:
                return [Left(runs)]
        return []

    def _take_back(self, consumer: Consumer, tags: Ranges, now: float) -> tuple[list[Run], Ranges]:
        runs, found = self._consumers.take_back(consumer, tags, now)
        self._moved_at = now if runs else self._moved_at
        return runs, found

    def _take_from(
        self, consumer: Consumer, tags: Ranges, now: float, *, expired: bool
    ) -> list[Command]:
        buried = self._restore(consumer, self._take_back(consumer, tags, now)[0])
        return [Released(consumer.id, tags, expired), *buried]

    def _restore(self, consumer: Consumer, runs: list[Run]) -> list[Command]:
        most = self.config.max_deliveries
        for run in runs:
            run.returns += 1
        buried = [run for run in runs if most is not None and run.returns >= most]
        if buried:
            runs = [run for run in runs if run not in buried]
            self._bury(consumer, buried)
        count = sum([run.count for run in runs])
        self._redelivered += count
        self._portions.returned += count
        self._lanes.restore(runs)
        return [Buried(consumer.id, run) for run in buried]

    def _bury(self, consumer: Consumer, runs: list[Run]) -> None:
        for run in runs:
            self._intake.held_bytes -= run.nbytes
            self.dead.bury(run)
        if self._journal is not None:
            gone = orders_of(runs)
            self._journal.append(Finished(self.name, consumer.id, (), gone, Outcome.DEAD))

    def _deadline(self) -> float:
        times = [take.deadline for take in self._waiting.values() if take.deadline is not None]
        times += [c.expires_at for c in self._consumers.known.values() if c.leased]
        return min([*times, self._intake.deadline()])

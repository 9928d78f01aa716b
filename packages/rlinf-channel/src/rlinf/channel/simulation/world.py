"""A virtual clock, a bad network, a disk, and a server that dies: where `actors` play a schedule.

The server is a `Hub` whose records go to a disk before anybody is answered. It can die at every
step: before it, after it but before its records are written, and after that but before anybody is
told. Another one then goes on from the disk. Messages of either direction are lost, doubled,
delayed and so overtaken; one that was sent to an earlier server is told so.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import NoReturn, Protocol

from rlinf.channel.config import ChannelConfig
from rlinf.channel.hub import Addressed, Hub
from rlinf.channel.journal import ServerState
from rlinf.channel.messages import (
    Buried,
    Cancel,
    ClientId,
    Close,
    Command,
    Commit,
    Event,
    Left,
    Put,
    Recall,
    Refusal,
    Refused,
    Released,
    Resume,
    Settle,
    Settled,
    Take,
)
from rlinf.channel.policy import BUILT_IN
from rlinf.channel.simulation.checks import Checks
from rlinf.channel.simulation.disk import own_put, revived
from rlinf.channel.simulation.things import Thing
from rlinf.channel.simulation.troubles import SINGLE, several

LIMIT_S = 500.0
LIMIT_STEPS = 10_000
"""Virtual seconds, and steps, in which every schedule must have come to an end."""
Answer = Callable[[object], None]


class Holder(Protocol):
    """A consumer as the world sees it."""

    id: ClientId
    channel: str
    to: int
    faithful: bool
    """It was never silent for as long as a lease."""
    ask: int | None
    """The take it waits for."""

    @property
    def held(self) -> Mapping[int, Thing]:
        """What it holds, by tag."""
        ...

    def recalled(self) -> None:
        """Give back what was brought along and not begun."""


_TAKE = [field.name for field in fields(Take)][1:]


@dataclass(frozen=True, slots=True)
class Replaced:
    """The answer to what was sent to an earlier server: the number of this one."""

    incarnation: int


class World:
    """One server with the channels ``in`` and ``out``, and what must hold on it at any moment.

    Item payloads are names, ``producer/0:3``; a commit puts an item of the same name to ``out``.
    """

    def __init__(self, seed: int, size: int = 1) -> None:
        self.random = rng = random.Random(seed)
        self.size = size
        self.now = 0.0
        self.story: list[tuple[float, str, object]] = []
        self.counts: Counter[str] = Counter()
        self.troubles = several(rng) if size else rng.choice(SINGLE)
        self.config = ChannelConfig(
            type=rng.choice(sorted(BUILT_IN)),
            buffer_size=rng.choice([20, 60, 10**9]),
            max_items=rng.choice([None, 1, 3, 8]),
            lease_s=rng.choice([1.0, 2.0]),
            max_deliveries=4 if self.troubles.poison else None,
        )
        self.gentle = not self.troubles.loss and self.config.lease_s == 2.0
        """No renewal comes too late, but from those who fall silent."""
        self.restarts_left = self.troubles.restarts
        self.incarnation = 0
        self.hub = Hub("channel/0")
        self.disk = ServerState()
        self.up = False
        self.clients: list[Callable[[], None]] = []
        """Of each living actor: what to do when it learns that the server was lost."""
        self.holders: dict[ClientId, Holder] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._answers: dict[int, Answer] = {}
        self._tickets: dict[object, int] = {}
        self._puts: dict[int, tuple[ClientId, int]] = {}
        """Producer and first number of each put, by its request."""
        self._due: list[tuple[float, int]] = []
        """When which request must have been answered."""
        self._open = {"in": 0, "out": 0}
        self._ended: set[str] = set()
        self.check = Checks(self.config, self.counts)
        self._begin()

    # What the actors use

    def tell(self, line: str, about: object = "") -> None:
        """Add a line to the story."""
        self.story.append((self.now, line, about))

    def later(self, delay: float, act: Callable[[], None]) -> None:
        """Run `act` after `delay` virtual seconds."""
        heapq.heappush(self._heap, (self.now + delay, next(self._numbers), act))

    def send(
        self,
        event: Event | Commit,
        channel: str,
        answer: Answer | None,
        to: int,
        ask: object = None,
    ) -> None:
        """Send a request to server number `to`; its answer may come once, twice or never.

        `ask` names a request which can be cancelled: put the name in `Cancel.request`.
        """
        rng, troubles = self.random, self.troubles
        copies = 2 if rng.random() < troubles.twice else 1
        for _ in range(copies):
            if rng.random() >= troubles.loss:
                self.later(
                    rng.random() * 0.2, lambda: self._arrive(event, channel, answer, to, ask)
                )

    def crash(self, client: ClientId) -> None:
        """A worker dies; the server learns of it, if it lives itself."""
        self.tell("dies:", client)
        self.counts["dead clients"] += 1
        to = self.incarnation
        self.later(self.random.random() * 0.1, lambda: self._gone(client, to))

    def join(self, channel: str) -> None:
        """One more actor which puts to this channel."""
        self._open[channel] += 1

    def leave(self, channel: str) -> None:
        """An actor puts no more to this channel; the last one closes it."""
        self._open[channel] -= 1
        if not self._open[channel]:
            self._close(channel)

    def closed(self, channel: str) -> bool:
        """Whether nobody puts to this channel any more."""
        return channel in self._ended

    def check_held(self, holder: Holder) -> None:
        """What has just come to a consumer that was never silent for a lease is its alone."""
        if self._keeps_its_leases(holder):
            self.check.held(holder.channel, holder.id, holder.held)

    def _keeps_its_leases(self, holder: Holder) -> bool:
        return self.gentle and holder.faithful and self.up and holder.to == self.incarnation

    # The server

    def _begin(self) -> None:
        self.incarnation += 1
        self.up = True
        self.hub = Hub("channel/0", incarnation=self.incarnation << 20, durable=True)
        self.hub.load({name: revived(state) for name, state in self.disk.channels.items()})
        if not self.disk.channels:
            for name in ("in", "out"):
                self.hub.create(name, self.config)
            self._write()

    def die(self) -> None:
        """The server dies: whoever waits is not answered. Another one begins after a while."""
        rng = self.random
        self.restarts_left -= 1
        self.counts["restarts"] += 1
        self.tell("the server dies", self.incarnation)
        self.up = False
        self._answers.clear()
        self._tickets.clear()
        self.check.forget_leases()
        down_s = rng.random()
        self.later(down_s, self._begin)
        for notice in list(self.clients):
            if rng.random() < 0.7:  # the others find out when they send something
                self.later(down_s + rng.random() * 0.3, notice)

    def _arrive(
        self, event: Event | Commit, channel: str, answer: Answer | None, to: int, ask: object
    ) -> None:
        if not self.up:
            return
        if to != self.incarnation:
            if answer is not None:
                self._reply(answer, Replaced(self.incarnation))
            return
        if isinstance(event, Cancel):
            ticket = self._tickets.get(event.request)
            if ticket is None:
                return
            event = Cancel(ticket)
        elif answer is not None:
            event = self._ticketed(event, answer, ask)
        self.tell(f"to '{channel}'", event)
        self._step(channel, event)

    def _ticketed(self, event: Event | Commit, answer: Answer, ask: object) -> Event | Commit:
        """The event with a request number, whose answer must come once and by its deadline."""
        ticket = next(self._numbers)
        self._answers[ticket] = answer
        if ask is not None:
            self._tickets[ask] = ticket
        if isinstance(event, Commit):
            event = replace(event, put=own_put(event.put, ticket))
            deadline = event.put.deadline
            self._puts[ticket] = event.put.producer, event.put.first
        elif isinstance(event, Resume):
            self._answers.pop(ticket)
            self.later(0.0, lambda: self._reply(answer, Settled(0)))
            deadline = None
        elif isinstance(event, Settle):
            event = Settle(ticket, event.consumer, event.tags, event.outcome)
            deadline = None
        else:
            assert isinstance(event, Put | Take)
            if isinstance(event, Put):
                self._puts[ticket] = event.producer, event.first
                event = own_put(event, ticket)
            else:
                event = Take(ticket, *[getattr(event, name) for name in _TAKE])
            deadline = event.deadline
        if deadline is not None:
            heapq.heappush(self._due, (max(deadline, self.now), ticket))
        return event

    def _step(self, channel: str, event: Event | Commit) -> None:
        """One event; the server may die before it, within it, and after it."""
        fate = self.random.random() if self.restarts_left > 0 else 1.0
        death = self.troubles.death
        if fate < death / 3:
            self.die()
            return
        self.check.settled(channel, event)
        if isinstance(event, Commit):
            commands = self.hub.commit(event, self.now)
        else:
            commands = self.hub.step(channel, event, self.now)
        self._conclude(commands, fate)

    def _conclude(self, commands: Sequence[Addressed], fate: float = 1.0) -> None:
        death = self.troubles.death
        if fate < 2 * death / 3:
            self.hub.records()
            self.die()
            return
        self._write()
        if fate < death:
            self.die()
            return
        self._obey(commands)

    def _write(self) -> None:
        records = self.hub.records()
        if records:
            self.check.written(records, self.hub)
            self.disk.replay(records)
        if self.restarts_left and self.random.random() < 0.03:  # the disk is tidied up
            self.disk.channels = {n: revived(s) for n, s in self.hub.save().items()}

    def _gone(self, client: ClientId, to: int) -> None:
        if self.up and to == self.incarnation:
            self._conclude(self.hub.gone(client.worker, client.epoch, self.now))

    def _close(self, channel: str) -> None:
        if channel in self._ended:
            return
        if self.up:
            self.tell("close", channel)
            self._step(channel, Close())
            if self.up and self.hub.get(channel).closed:
                self._ended.add(channel)
        self.later(0.5, lambda: self._close(channel))

    def _obey(self, commands: Sequence[Addressed]) -> None:
        if not commands:
            return
        for channel, command in commands:
            self.check.command(channel, command)
            if isinstance(command, Refused) and command.reason is Refusal.STANDSTILL:
                holders = [h for h in self.holders.values() if self._keeps_its_leases(h)]
                able = {h.id for h in holders if h.channel == channel and h.held and not h.ask}
                self.check.waited_in_vain(self._puts[command.request], able)
        for _, command in commands:
            if isinstance(command, Recall):
                self.counts["recalls"] += 1
                holder = self.holders.get(command.consumer)
                if holder is not None:
                    self.later(self.random.random() * 0.1, holder.recalled)
                continue
            if isinstance(command, Released) and command.expired:
                holder = self.holders[command.consumer]
                if self._keeps_its_leases(holder) and holder.id == command.consumer:
                    self.check.released(command, holder.held)
            if not isinstance(command, Released | Buried | Left):
                answer = self._answers.pop(command.request, None)
                assert answer is not None, f"answered twice: {command}"
                self._reply(answer, command)

    def _reply(self, answer: Answer, command: Command | Replaced) -> None:
        if self.random.random() >= self.troubles.loss:
            self.later(self.random.random() * 0.1, lambda: answer(command))

    # The clock

    def run(self) -> dict[str, int]:
        """Play until nothing is left to do, then check what is where."""
        for _ in range(LIMIT_STEPS):
            if not self._heap and not self._answers:
                break
            self._advance()
        else:
            self._no_end()
        self.check.at_the_end(self.hub, self.now)
        return dict(self.counts)

    def _advance(self) -> None:
        wake = self.hub.wake_at if self.up else math.inf
        heap = self._heap
        if self.now > LIMIT_S or (not heap and wake == math.inf):
            self._no_end()
        if not heap or wake <= heap[0][0]:
            self.now = max(self.now, wake)
            self._conclude(self.hub.tick(self.now))
        else:
            self.now, _, act = heapq.heappop(heap)
            act()
        while self._due and self._due[0][0] < self.now - 1e-9:
            deadline, ticket = heapq.heappop(self._due)
            assert ticket not in self._answers, f"a request waits beyond {deadline}"

    def _no_end(self) -> NoReturn:
        states = [queue.statistics(self.now) for queue in self.hub]
        raise AssertionError(f"no end in sight, {len(self._answers)} unanswered: {states}")

"""A virtual clock, a lossy network and a `Hub`: the world in which `actors` play one schedule."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from rlinf.channel.config import ChannelConfig
from rlinf.channel.hub import Addressed, Hub
from rlinf.channel.messages import (
    ClientId,
    Close,
    Command,
    Commit,
    Delivered,
    Event,
    Item,
    Recall,
    Released,
)
from rlinf.channel.policy import BUILT_IN

LIMIT_S = 500.0
"""Virtual seconds in which every schedule must have come to an end."""
MAX_NBYTES = 9
"""No simulated item is larger."""


class World:
    """One server with the channels ``in`` and ``out``, and what must hold on it at any moment.

    Item payloads are names, ``producer/0:3``; a commit puts an item of the same name to ``out``.
    """

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.hub = Hub("channel/0")
        self.now = 0.0
        self.story: list[str] = []
        self.config = ChannelConfig(
            type=rng.choice(sorted(BUILT_IN)),
            buffer_size=rng.choice([20, 60, 10**9]),
            max_items=rng.choice([None, 1, 3, 8]),
            lease_s=rng.choice([0.5, 2.0]),
        )
        for name in ("in", "out"):
            self.hub.create(name, self.config)
        self._bound_bytes = self.config.buffer_bytes
        self.loss = rng.choice([0.0, 0.1, 0.3])
        self.counts: Counter[str] = Counter()
        self.accepted: set[str] = set()
        self.effects: dict[str, Counter[str]] = {"in": Counter(), "out": Counter()}
        self.holders: dict[tuple[str, str], ClientId] = {}
        self.recalls: dict[ClientId, Callable[[], None]] = {}
        self._open = {"in": 0, "out": 0}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._answers: dict[int, Callable[[Command], None]] = {}
        self._deadlines: dict[int, float] = {}
        self._last: dict[tuple[str, str, str | None], int] = {}
        self._seen: set[tuple[str, str]] = set()

    # What the actors use

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.now:.3f} {line}")

    def later(self, delay: float, act: Callable[[], None]) -> None:
        """Run `act` after `delay` virtual seconds."""
        heapq.heappush(self._heap, (self.now + delay, next(self._numbers), act))

    def request(self, answer: Callable[[Command], None], deadline: float | None = None) -> int:
        """A request number; its answer must come once and by the deadline."""
        number = next(self._numbers)
        self._answers[number] = answer
        if deadline is not None:
            self._deadlines[number] = deadline
        return number

    def redirect(self, number: int, answer: Callable[[Command], None]) -> None:
        """Have the answer to a request that is not yet sent go elsewhere."""
        self._answers[number] = answer

    def step(self, channel: str, event: Event | Commit) -> None:
        """Give one event to the hub and carry out what it answers."""
        if isinstance(event, Commit):
            self._obey(self.hub.commit(event, self.now))
        else:
            self._obey(self.hub.step(channel, event, self.now))

    def crash(self, client: ClientId) -> None:
        """The server learns that this incarnation is gone."""
        self.tell(f"{client} (epoch {client.epoch}) is gone")
        self._obey(self.hub.gone(client.worker, client.epoch, self.now))

    def join(self, channel: str) -> None:
        """One more actor which puts to this channel."""
        self._open[channel] += 1

    def leave(self, channel: str) -> None:
        """An actor puts no more to this channel; the last one closes it."""
        self._open[channel] -= 1
        if not self._open[channel]:
            self.tell(f"close {channel}")
            self.step(channel, Close(self.request(lambda command: None)))

    def effect(self, channel: str, name: str) -> None:
        """The item was acknowledged by somebody who held it."""
        self.effects[channel][name] += 1
        assert self.effects[channel][name] == 1, f"{name} took effect twice in '{channel}'"

    # The clock

    def run(self) -> dict[str, int]:
        """Play until nothing is left to do, then check what is where."""
        while self._heap or self._answers:
            self._advance()
        for channel, names in (("in", self.accepted), ("out", set(self.effects["out"]))):
            lost = names - set(self.effects[channel])
            assert not lost, f"accepted by '{channel}', then lost: {sorted(lost)}"
            state = self.hub.get(channel).statistics(self.now)
            assert state.closed and self.hub.get(channel).drained, f"not drained: {state}"
            assert state.acknowledged_items == state.put_items, f"not all settled: {state}"
            self.counts[f"{channel} items"] = state.put_items
            self.counts["duplicates"] += state.duplicate_items
        return dict(self.counts)

    def _advance(self) -> None:
        wake = self.hub.wake_at
        if self.now > LIMIT_S or (not self._heap and wake == float("inf")):
            states = [queue.statistics(self.now) for queue in self.hub]
            raise AssertionError(f"no end in sight, {len(self._answers)} unanswered: {states}")
        if not self._heap or wake <= self._heap[0][0]:
            self.now = max(self.now, wake)
            self._obey(self.hub.tick(self.now))
        else:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        for number, deadline in self._deadlines.items():
            assert deadline > self.now - 1e-9, f"request {number} waits beyond {deadline}"

    def _obey(self, commands: Sequence[Addressed]) -> None:
        for channel, command in commands:
            if isinstance(command, Released):
                self._released(channel, command)
            elif isinstance(command, Delivered):
                self._check_delivery(channel, command)
        for _, command in commands:  # only now: an actor's answer may be its next step
            if isinstance(command, Recall):
                self.counts["recalls"] += 1
                self.later(self.random.random() * 0.1, self.recalls[command.consumer])
            elif not isinstance(command, Released):
                self._deadlines.pop(command.request, None)
                answer = self._answers.pop(command.request, None)
                assert answer is not None, f"answered twice: {command}"
                answer(command)
        self._check_bounds()

    # What must hold

    def _released(self, channel: str, released: Released) -> None:
        self.tell(f"{channel}: released {released}")
        self.counts["expired" if released.expired else "lost with their holder"] += 1
        mine = [where for where, who in self.holders.items() if who == released.consumer]
        for where in mine:
            if where[0] == channel:
                del self.holders[where]

    def _check_delivery(self, channel: str, delivered: Delivered) -> None:
        names = [item.payload for item in delivered.items]
        self.tell(f"{channel}: {names} to {delivered.consumer}, tags from {delivered.first_tag}")
        for item in delivered.items:
            where = (channel, str(item.payload))
            holder = self.holders.get(where)
            assert holder is None, f"{where} goes to {delivered.consumer}, but {holder} has it"
            self.holders[where] = delivered.consumer
            self.counts["redelivered"] += item.returns > 0
            if where not in self._seen:
                self._seen.add(where)
                self._check_order(channel, item)

    def _check_order(self, channel: str, item: Item) -> None:
        if channel != "in":
            return
        producer, _, number = str(item.payload).partition(":")
        lane = (channel, producer, item.key)
        last = self._last.get(lane, -1)
        assert int(number) > last, f"{item.payload} came after number {last} of {lane}"
        self._last[lane] = int(number)

    def _check_bounds(self) -> None:
        bound = max(self._bound_bytes, 3 * MAX_NBYTES)  # one atomic commit may exceed it
        for queue in self.hub:
            held = queue.held_bytes
            assert held <= bound, f"'{queue.name}' holds {held} bytes of {bound}"

"""Checks that ship with the package: a seeded simulation of queue, policies and lock, and a model.

`check_channel(seed)` and `check_lock(seed)` play one random schedule each on a virtual clock:
producers whose messages are lost, repeated and reordered, consumers that crash, pause past their
lease and come back, commits, bounds, deadlines. They raise `Violation` with the seed and a short
story; the same seed plays the same schedule again. `DequeModel` is what a channel means when
nothing fails, for comparison step by step. `Rig` puts real workers around a real server.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from rlinf.channel.actors import populate
from rlinf.channel.lock_core import (
    Acquire,
    Denied,
    Ended,
    Granted,
    Keep,
    LockCommand,
    LockCore,
    Release,
)
from rlinf.channel.messages import ClientId, Gone, Refused, Settled, Tick
from rlinf.channel.rig import Program, Rig, host
from rlinf.channel.simulation import World

__all__ = ["DequeModel", "Program", "Rig", "Violation", "check_channel", "check_lock", "host"]


class Violation(AssertionError):
    """An invariant did not hold; the message is the story of the schedule that broke it."""


def check_channel(seed: int) -> dict[str, int]:
    """Play one schedule over two channels of one server; what happened, in numbers.

    Invariants: nothing accepted is lost, nothing takes effect twice, order for each producer and
    key, bounds, every request answered once and by its deadline, no item held by two consumers,
    and everything comes to an end.
    """
    world = World(seed)
    try:
        populate(world)
        return world.run()
    except AssertionError as error:
        story = "\n  ".join(world.story[-40:])
        raise Violation(f"channel schedule {seed}: {error}\n  {story}") from error


def check_lock(seed: int) -> dict[str, int]:
    """Play one schedule of the device lock; what happened, in numbers.

    Invariants: a device has one holder, sets are granted whole, tokens rise, no waiter is passed
    by a later order that wants one of its devices, deadlines hold, and all come to an end.
    """
    simulation = _LockSimulation(seed)
    try:
        return simulation.run()
    except AssertionError as error:
        story = "\n  ".join(simulation.story[-40:])
        raise Violation(f"lock schedule {seed}: {error}\n  {story}") from error


class DequeModel:
    """A channel of one consumer as plain as it can be: what `Queue` must agree with."""

    def __init__(self, max_items: int | None = None) -> None:
        self.queued: deque[tuple[int, float]] = deque()
        self.leased: deque[tuple[int, float]] = deque()
        self.max_items = max_items
        self.closed = False

    def put(self, name: int, weight: float) -> bool:
        """Whether the item was accepted."""
        if self.closed or (self.max_items is not None and len(self.queued) >= self.max_items):
            return False
        self.queued.append((name, weight))
        return True

    def take(self, max_items: int | None, target_weight: float | None) -> list[int]:
        """A batch, or nothing if it is not complete."""
        chosen: list[tuple[int, float]] = []
        complete = False
        for item in self.queued:
            weight = sum(w for _, w in chosen)
            if target_weight is not None and chosen and weight + item[1] > target_weight:
                complete = True
                break
            chosen.append(item)
            weight += item[1]
            if len(chosen) == max_items or (target_weight is not None and weight >= target_weight):
                complete = True
                break
        if not complete and not self.closed:
            return []
        for item in chosen:
            self.queued.popleft()
            self.leased.append(item)
        return [name for name, _ in chosen]

    def settle(self, returned: bool) -> None:
        """Everything leased is done, or goes back to the front."""
        if returned:
            self.queued.extendleft(reversed(self.leased))
        self.leased.clear()


class _LockSimulation:
    """Clients which want random sets of devices, hold them, crash, or fall silent."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lease_s = 1.0
        self.core = LockCore(self.lease_s)
        self.now = 0.0
        self.story: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._asked: dict[int, Acquire] = {}
        self._held: dict[int, Acquire] = {}
        self._last_token = 0
        self._counts = {"granted": 0, "denied": 0, "ended": 0}

    def run(self) -> dict[str, int]:
        """Play to the end."""
        devices = [f"gpu:{i}" for i in range(self.random.randint(1, 4))]
        for number in range(self.random.randint(2, 8)):
            client = ClientId(f"worker/{number}", 1, 0)
            self._later(self.random.random(), partial(self._ask, client, devices, 3))
        while self._heap or self._asked or self._held:
            wake = self.core.wake_at
            assert self._heap or wake < float("inf"), f"stuck: {self.core.statistics(self.now)}"
            if not self._heap or wake <= self._heap[0][0]:
                self.now = max(self.now, wake)
                self._step(Tick())
            else:
                self.now, _, act = heapq.heappop(self._heap)
                act()
            late = [a for a in self._asked.values() if a.deadline and a.deadline < self.now]
            assert not late, f"waits beyond its deadline: {late}"
        return self._counts

    def _later(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._numbers), act))

    def _ask(self, client: ClientId, devices: Sequence[str], left: int) -> None:
        if not left:
            return
        rng = self.random
        wanted = frozenset(rng.sample(list(devices), rng.randint(1, len(devices))))
        order = (rng.randint(0, 2), rng.randint(0, 3))
        deadline = self.now + rng.uniform(0.1, 5) if rng.random() < 0.4 else None
        acquire = Acquire(next(self._numbers), client, wanted, order, deadline)
        self._asked[acquire.request] = acquire
        if rng.random() < 0.15:
            self._later(rng.random() * 2, lambda: self._crash(client))
        self._later(rng.random() * 3, lambda: self._ask(client, devices, left - 1))
        self.story.append(f"{self.now:.3f} {client} asks {sorted(wanted)} order {order}")
        self._step(acquire)

    def _crash(self, client: ClientId) -> None:
        self.story.append(f"{self.now:.3f} {client} crashes")
        self._step(Gone(client.worker, client.epoch))

    def _step(self, event: Acquire | Release | Keep | Gone | Tick) -> None:
        for command in self.core.step(event, self.now):
            self._obey(command)

    def _obey(self, command: LockCommand) -> None:
        self.story.append(f"{self.now:.3f} {command}")
        if isinstance(command, Granted):
            self._granted(command)
        elif isinstance(command, Denied):
            deadline = self._asked.pop(command.request).deadline
            assert deadline is not None and deadline <= self.now
            assert command.holders or command.ahead, "denied although nobody stood in the way"
            self._counts["denied"] += 1
        elif isinstance(command, Refused):
            assert self._asked.pop(command.request, None), "answered twice"
        elif isinstance(command, Ended):
            assert self._held.pop(command.token, None), "ended what was not held"
            self._counts["ended"] += 1
        else:
            assert isinstance(command, Settled)

    def _granted(self, granted: Granted) -> None:
        acquire = self._asked.pop(granted.request)
        assert granted.token > self._last_token, "the token did not rise"
        self._last_token = granted.token
        for other in self._held.values():
            assert acquire.devices.isdisjoint(other.devices), "a device has two holders"
        for other in self._asked.values():
            passed = other.order < acquire.order and not acquire.devices.isdisjoint(other.devices)
            assert not passed, f"{acquire} passed {other}"
        self._held[granted.token] = acquire
        self._counts["granted"] += 1
        if self.random.random() < 0.8:  # the others fall silent: their lease must end
            self._later(self.random.random() * 0.9, lambda: self._release(granted.token))

    def _release(self, token: int) -> None:
        self._held.pop(token, None)
        self._step(Release(next(self._numbers), token))

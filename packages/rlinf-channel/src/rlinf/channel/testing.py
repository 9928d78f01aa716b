"""Checks that ship with the package: a seeded simulation of queue, policies and lock, and a model.

`check_channel(seed)` and `check_lock(seed)` play one random schedule each on a virtual clock:
producers whose messages are lost, repeated and reordered, consumers that crash, pause past their
lease and come back, commits, bounds, deadlines. They raise `Violation` with the seed and a short
story; the same seed plays the same schedule again. `DequeModel` is what a channel means when
nothing fails, for comparison step by step. `Rig` puts real workers around a real server.
"""

import gc
from collections import deque

from rlinf.channel.fake_memory import FakeMemory, FakeTensor
from rlinf.channel.rig import Program, Rig, host, host_with_little_disk
from rlinf.channel.simulation.actors import populate
from rlinf.channel.simulation.locks import LockSimulation
from rlinf.channel.simulation.world import World

__all__ = [
    "DequeModel",
    "FakeMemory",
    "FakeTensor",
    "Program",
    "Rig",
    "Violation",
    "check_channel",
    "check_lock",
    "host",
    "host_with_little_disk",
]


class Violation(AssertionError):
    """An invariant did not hold; the message is the story of the schedule that broke it."""


def check_channel(seed: int, size: int = 1) -> dict[str, int]:
    """Play one schedule over two channels of one server; what happened, in numbers.

    Invariants: nothing accepted is lost, nothing takes effect twice, order for each producer and
    key, bounds, every request answered once and by its deadline, no item held by two consumers,
    what was answered is on the disk, and everything comes to an end.

    Args:
        seed: Of everything that happens.
        size: 0: an item or two and one kind of trouble, twice as many schedules a second as 1: all
            kinds of trouble together; 3: up to three producers and consumers of ``in``, and 27
            items.
    """
    world = World(seed, size)
    collects = gc.isenabled()
    gc.disable()  # a schedule is over before its garbage matters
    try:
        populate(world)
        return world.run()
    except (AssertionError, ArithmeticError, LookupError) as error:
        story = "\n  ".join(f"{at:.3f} {what} {about}" for at, what, about in world.story[-40:])
        call = f"check_channel({seed}, {size})"
        raise Violation(f"{call}: {error!r}\n  {story}") from error
    finally:
        if collects:
            gc.enable()


def check_lock(seed: int) -> dict[str, int]:
    """Play one schedule of the device lock; what happened, in numbers.

    Invariants: a device has one holder, sets are granted whole, tokens rise, no waiter is passed
    by a later order that wants one of its devices, deadlines hold, and all come to an end.
    """
    simulation = LockSimulation(seed)
    try:
        return simulation.run()
    except AssertionError as error:
        story = "\n  ".join(simulation.story[-40:])
        raise Violation(f"check_lock({seed}): {error}\n  {story}") from error


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

"""A schedule of the device lock: clients that crash or fall silent, and a server that dies."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from rlinf.channel.journal import Record, ServerState
from rlinf.channel.lock_core import (
    Acquire,
    Denied,
    Ended,
    Granted,
    Keep,
    LockCommand,
    LockCore,
    Release,
    Vacate,
    Vacated,
)
from rlinf.channel.messages import ClientId, Gone, Refused, Settled, Tick

ROOM_BYTES = 10


class LockSimulation:
    """Clients which want random sets of devices, hold them, stay there, crash, or fall silent."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lease_s = 1.0
        self.now = 0.0
        self.lives = 0
        self.restarts_left = self.random.choice([0, 0, 1, 2])
        self.journal: list[Record] = []
        self.disk = ServerState()
        self.core = self._begin()
        self.story: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._asked: dict[int, Acquire] = {}
        self._held: dict[int, Acquire] = {}
        self._there: dict[int, tuple[Acquire, int]] = {}
        """What is on devices without a grant, by the token of the grant before; and its bytes."""
        self._last_token = 0
        self._clients = count(1)
        self._counts = {"granted": 0, "denied": 0, "ended": 0, "restarts": 0, "stayed": 0}

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
                self.now, life = max(self.now, wake), self.lives
                self._step(Tick())
                due = self.core.wake_at <= self.now and self.lives == life
                assert not due, f"what is due is not done: {self.core.statistics(self.now)}"
            else:
                self.now, _, act = heapq.heappop(self._heap)
                act()
            late = [a for a in self._asked.values() if a.deadline and a.deadline < self.now]
            assert not late, f"waits beyond its deadline: {late}"
        return self._counts

    def _begin(self) -> LockCore:
        """A server, which goes on with what is on the disk."""
        self.lives += 1
        self.journal.clear()
        core = LockCore(self.lease_s, first_token=self.lives << 20, journal=self.journal)
        core.load(self.disk.grants.values(), self.now)
        return core

    def _die(self) -> None:
        """The server dies, and the next one begins. Who waits asks again, who holds goes on."""
        self.restarts_left -= 1
        self._counts["restarts"] += 1
        self.story.append(f"{self.now:.3f} the server dies")
        self.core = self._begin()
        self._there.clear()  # they leave when they learn of it
        waiting, self._asked = list(self._asked.values()), {}
        self._held = {token: a for token, a in self._held.items() if token in self.disk.grants}
        for acquire in waiting:
            again = replace(acquire, request=next(self._numbers))
            if again.deadline is not None:
                again = replace(again, deadline=max(again.deadline, self.now))
            self._asked[again.request] = again
            self._step(again)

    def _later(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._numbers), act))

    def _ask(self, client: ClientId, devices: Sequence[str], left: int) -> None:
        if not left:
            return
        rng = self.random
        wanted = frozenset(rng.sample(list(devices), rng.randint(1, len(devices))))
        order = (rng.randint(0, 2), rng.randint(0, 3))
        deadline = self.now + rng.uniform(0.1, 5) if rng.random() < 0.4 else None
        busy = any(a.client == client for a in (*self._asked.values(), *self._held.values()))
        asking = client._replace(number=next(self._clients)) if busy else client
        size = rng.choice([(0, 0), (0, ROOM_BYTES), (rng.randint(1, ROOM_BYTES), ROOM_BYTES)])
        acquire = Acquire(next(self._numbers), asking, wanted, order, deadline, *size)
        self._asked[acquire.request] = acquire
        if rng.random() < 0.15:
            self._later(rng.random() * 2, lambda: self._crash(client))
        self._later(rng.random() * 3, lambda: self._ask(client, devices, left - 1))
        self.story.append(f"{self.now:.3f} {client} asks {sorted(wanted)} order {order}")
        self._step(acquire)

    def _crash(self, client: ClientId) -> None:
        self.story.append(f"{self.now:.3f} {client} crashes")
        self._there = {t: p for t, p in self._there.items() if p[0].client[:2] != client[:2]}
        self._step(Gone(client.worker, client.epoch))

    def _step(self, event: Acquire | Release | Vacated | Keep | Gone | Tick) -> None:
        fate = self.random.random() if self.restarts_left else 1.0
        commands = self.core.step(event, self.now)
        if fate < 0.03:  # before its records are written
            self._die()
            return
        self.disk.replay(self.journal)
        self.journal.clear()
        if fate < 0.06:  # before anybody is told
            self._die()
            return
        for command in commands:
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
        elif isinstance(command, Vacate):
            self._later(self.random.random() * 0.5, lambda: self._vacate(command.token))
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
        if self.random.random() < 0.1:  # nobody waits for it any more
            self._held[granted.token] = acquire
            self._later(self.random.random() * 0.1, lambda: self._end(granted.token, None))
            return
        self._check_room(acquire)
        self._held[granted.token] = acquire
        self._counts["granted"] += 1
        if self.random.random() < 0.8:  # the others fall silent: their lease must end
            self._later(self.random.random() * 0.9, lambda: self._release(granted.token))

    def _check_room(self, acquire: Acquire) -> None:
        """Who stays has room beside the new holder, which finds there what it left itself."""
        mine = [t for t, (a, _) in self._there.items() if a.client == acquire.client]
        for token in mine:
            del self._there[token]
        for device in acquire.devices:
            there = [nbytes for a, nbytes in self._there.values() if device in a.devices]
            fits = acquire.nbytes and acquire.nbytes + sum(there) <= acquire.room_bytes
            assert fits or not there, f"no room for {acquire} beside {there} bytes on {device}"
            self._counts["stayed"] += bool(there)

    def _vacate(self, token: int) -> None:
        """Leave, unless it holds the devices again; said late, and perhaps twice."""
        self._there.pop(token, None)
        for _ in range(self.random.randint(1, 2)):
            self._later(self.random.random() * 0.2, lambda: self._step(Vacated(token)))

    def _release(self, token: int) -> None:
        acquire = self._held.get(token)
        stays = self.random.choice([0, acquire.nbytes]) if acquire else 0
        self._there.pop(token, None)
        if acquire and stays:
            self._there[token] = acquire, stays
        self._end(token, stays)

    def _end(self, token: int, stays: int | None) -> None:
        acquire, life = self._held.pop(token, None), self.lives
        self._step(Release(next(self._numbers), token, stays))
        if self.lives != life and acquire and token in self.disk.grants:  # ask the next one
            self._held[token] = acquire
            self._later(0.05, lambda: self._end(token, stays))

"""The actors of the simulation: producers and consumers that fail in every way, and come back.

They keep to what real clients do: a request without an answer is sent again where its numbers make
that harmless, or given up; after a restart of the server a producer resumes before it sends what
is outstanding, and a consumer forgets what it held.
"""

from collections.abc import Callable
from typing import Any

from rlinf.channel.messages import (
    Accepted,
    Cancel,
    ClientId,
    Commit,
    Delivered,
    Outcome,
    Put,
    Recalled,
    Refusal,
    Refused,
    Renew,
    Resume,
    Settle,
    Settled,
    Take,
)
from rlinf.channel.simulation.clients import NOBODY, Holder, Request
from rlinf.channel.simulation.producers import Producer
from rlinf.channel.simulation.things import Thing, runs_of, things_of
from rlinf.channel.simulation.world import World
from rlinf.channel.spans import expand, ranges

POISON = "producer/0:0"
Act = Callable[[], None]


def populate(world: World) -> None:
    """Some producers and consumers of ``in``, of which some commit to ``out``, and one of ``out``.

    Whoever takes from ``in`` counts as a producer of ``out``, so ``out`` closes after ``in``.
    """
    rng, size = world.random, max(1, world.size)
    for number in range(rng.randint(1, size)):
        Producer(world, number, rng.randint(1, 3 * size - 1))
    commit = [rng.random() < (0.5 if world.size else 0.1) for _ in range(rng.randint(1, size))]
    for number, commits in enumerate(commit):
        Consumer(world, "in", number, commits=commits)
    if any(commit):
        Consumer(world, "out", 9, commits=False)


class Consumer(Holder):
    """Takes in every way there is; then works, returns, commits, pauses too long, or dies."""

    def __init__(self, world: World, channel: str, number: int, *, commits: bool) -> None:
        super().__init__(world)
        self.channel = channel
        self.commits = commits
        self.deaths_left = world.random.randint(0, world.troubles.deaths)
        self.hoards = world.random.random() < 0.25
        """It takes as many as `goal` before it lets go of any, and waits for them as long as the
        channel is open: where they have no room together, only a refused put helps.
        """
        self.goal = 0
        self.renews_while_waiting = self.hoards or world.random.random() < 0.2
        """As real ones do; not all here, because it makes up most of a schedule."""
        self.asks = 0
        self.id = ClientId(f"consumer/{number}", 0, 0)
        if channel == "in":
            world.join("out")
        self._start()

    # Life

    def _start(self) -> None:
        self.id = ClientId(self.id.worker, self.id.epoch + 1, 0)
        self.to, self.ready = self.world.incarnation, True
        self.held: dict[int, Thing] = {}
        self.begun: set[int] = set()
        self.sequence = self.goal = 0
        self.silent = False
        self.ask: int | None = None
        self.stopped_until = 0.0
        self.faithful = True
        self.request: Request | None = None
        self.world.holders[self.id] = self
        self._later(self.world.random.random() * 0.5, self._take)
        self._renewing = False

    def _later(self, delay: float, act: Act) -> None:
        """Run `act` unless this incarnation has ended by then; if it is stopped, afterwards."""
        me, world = self.id, self.world

        def due() -> None:
            if self.id != me:
                return
            if self.stopped_until > world.now:  # what has become due meanwhile comes in any order
                world.later(self.stopped_until - world.now + world.random.random() * 1e-3, due)
            else:
                act()

        world.later(delay, due)

    def _stop(self) -> None:
        """Do nothing for so long that with the first renewal, a third of a lease later, and both
        ways there is still no lease over; as a process without a core, or at a SIGSTOP.
        """
        world = self.world
        if world.now > self.stopped_until + 0.01:
            self.stopped_until = world.now + world.random.uniform(0.35, 0.5) * world.config.lease_s
            world.tell(f"until {self.stopped_until:.3f} stopped:", self.id)

    def _die(self) -> None:
        self.world.crash(self.id)
        self._start()

    def _renew(self) -> None:
        asks = (self.ask,) if self.ask is not None and self.renews_while_waiting else ()
        self._renewing = bool(self.held or asks)
        if not self._renewing:
            return
        if not self.silent and self.ready:
            renew = Renew(None, self.id, ranges(sorted(self.held)), ranges(asks))
            self.world.send(renew, self.channel, None, self.to)
        self._later(self.world.config.lease_s / 3, self._renew)

    def _end(self) -> None:
        self.id = NOBODY
        self.world.clients.remove(self.notice)
        if self.channel == "in":
            self.world.leave("out")

    def resumption(self) -> tuple[str, Resume]:
        """See `Client`."""
        numbers = self.request.numbers if self.request is not None else None
        outstanding = () if numbers is None else numbers
        return "out" if self.commits else self.channel, Resume(self.id, self.sequence, outstanding)

    def lost(self) -> None:
        """See `Client`."""
        self.held, self.begun, self.ask, self.goal = {}, set(), None, 0

    def back(self) -> None:
        """See `Client`."""
        if self.request is None:
            self._later(0.1, self._take_again)

    # Taking

    def _take_again(self) -> None:
        if self.ask is None and not self._lacks and self.held and self.request is None:
            self._work()
        elif self.ask is None and (self._lacks or not self.held) and self.request is None:
            self._take()

    @property
    def _lacks(self) -> bool:
        """Whether it has some, and wants more before it begins."""
        return 0 < len(self.held) < self.goal and not self.begun

    def _take(self) -> None:
        if not self.ready:
            return
        rng, now = self.world.random, self.world.now
        self.asks += 1
        ask = self.ask = self.asks
        deadline = now + rng.uniform(0.05, 3) if rng.random() < 0.4 else None
        for tag in self.begun:
            self.held.pop(tag, None)
        done, self.begun = ranges(sorted(self.begun)), set()
        wish = self._wish(deadline)
        holds = len(self.held)
        take = Take(0, self.id, deadline=deadline, done=done, holds=holds, ask=ask, **wish)
        if self.renews_while_waiting:
            self._see_to_renewals()

        def answer(command: object) -> None:
            if not self.answered_by_another(command):
                if rng.random() < self.world.troubles.stop:
                    self._stop()
                self._later(0.0, lambda: self._taken(take, ask, command))

        self.world.send(take, self.channel, answer, self.to, ask=(take.consumer, ask))
        if rng.random() < 0.1:
            self._later(0.1, lambda: self._cancel(ask))
        patience = (3.0 if deadline is None else deadline - now) + 0.5
        self._later(patience, lambda: self._give_up(ask))

    def _wish(self, deadline: float | None) -> dict[str, Any]:
        rng = self.world.random
        if deadline is not None and rng.random() < 0.3:
            return {"key": "a"} if rng.random() < 0.7 else {"max_items": None, "full": True}
        return rng.choice(
            [
                {},
                {"max_items": rng.randint(2, 5)},
                {"max_items": rng.randint(2, 4), "full": True},
                {"max_items": None, "target_weight": rng.uniform(1, 12), "full": True},
                {"max_items": 3, "target_weight": rng.uniform(1, 12), "full": True},
                {"max_items": 3, "wait": False},
                {"max_items": 2, "wait": False, "full": True, "along": 2},
            ]
        )

    def _cancel(self, ask: int) -> None:
        cancel = Cancel((self.id, ask))  # type: ignore[arg-type]
        self.world.send(cancel, self.channel, None, self.to)

    def _give_up(self, ask: int) -> None:
        if self.ask == ask:
            self.ask = None
            self._cancel(ask)
            if self.world.closed(self.channel):
                self.goal = 0
            self._take_again()

    def _taken(self, take: Take, ask: int, command: object) -> None:
        got = isinstance(command, Delivered) and bool(command.runs)
        if self.ask != ask or take.consumer != self.id:
            if got and take.consumer == self.id:
                assert isinstance(command, Delivered)
                count = sum(run.count for run in command.runs)
                tags = command.first_tag, command.first_tag + count - 1
                if self.held.keys().isdisjoint(expand(tags)):  # not a repeated answer
                    self._give_back(tags)
            return
        self.ask = None
        if isinstance(command, Delivered) and got:
            self.held.update(enumerate(things_of(command.runs), start=command.first_tag))
            self.world.check_held(self)
            self._see_to_renewals()
            if self.hoards and not self.goal:
                self.goal = self.world.random.randint(2, 5)
            if self._lacks:
                self._take()
                return
            self.goal = 0
            self.begun = set(self.held) if take.full else set()
            self._choose_fate()
        elif isinstance(command, Refused) and command.reason is Refusal.CLOSED and not take.key:
            self.goal = 0
            if self.held:
                self._choose_fate()
            else:
                self._end()
        else:
            assert not isinstance(command, Accepted | Settled), command
            self._later(self.world.random.random() * 0.2, self._take_again)

    def _see_to_renewals(self) -> None:
        if not self._renewing:
            self._renewing = True
            self._later(self.world.config.lease_s / 3, self._renew)

    def recalled(self) -> None:
        """Give back what was brought along and not begun."""
        tags = [tag for tag in self.held if tag not in self.begun and not self.goal]
        for tag in tags:
            del self.held[tag]
        self._give_back(ranges(sorted(tags)))

    def _give_back(self, tags: tuple[int, ...]) -> None:
        if self.ready and self.id != NOBODY:
            self.world.send(Recalled(self.id, tags), self.channel, None, self.to)

    # Working

    def _choose_fate(self) -> None:
        rng, lease_s = self.world.random, self.world.config.lease_s
        fate = rng.random()
        if fate < 0.15 and self.deaths_left:
            self.deaths_left -= 1
            self._later(rng.random(), self._die)
        elif fate < 0.15 + self.world.troubles.silence:
            self.silent, self.faithful = True, False
            self.world.tell("falls silent:", self.id)
            self.begun.update(self.held)
            self._later(lease_s * rng.uniform(0.5, 2.5), self._unless_lost(self._work))
        else:
            self._work()

    def _work(self) -> None:
        """Work on what has been begun, or else on the next item."""
        self.silent = False
        if not self.held:
            self._later(self.world.random.random() * 0.2, self._take_again)
            return
        if not self.begun:
            self.begun = {min(self.held)}
        names = [self.held[tag].payload for tag in self.begun]
        if self.world.troubles.poison and POISON in names:
            self._later(self.world.random.random() * 0.2, self._unless_lost(self._die))
            return
        longest = 1.0 if self.world.size else 0.3
        seconds = self.world.random.random() * longest * self.world.config.lease_s
        self._later(seconds, self._unless_lost(self._settle))

    def _unless_lost(self, act: Act) -> Act:
        """`act`, unless what is begun now has ended with its server by then."""
        begun = self.begun
        return lambda: act() if self.begun is begun else None

    def _settle(self) -> None:
        rng = self.world.random
        tags = tuple(sorted(tag for tag in self.begun if tag in self.held))
        if not tags:
            self._take_again()
        elif self.commits:
            self._commit(tags)
        elif len(tags) == len(self.held) and rng.random() < 0.3:
            self._take()  # the take itself acknowledges
        else:
            outcome = Outcome.RETURNED if rng.random() < 0.15 else Outcome.DONE
            self._let_go(tags, outcome)

    def _let_go(self, tags: tuple[int, ...], outcome: Outcome) -> None:
        orders = [self.held.pop(tag).order for tag in tags]
        self.begun = set()

        def answered(command: object) -> None:
            assert isinstance(command, Settled), command
            if outcome is Outcome.DONE and not command.lost:
                self.world.check.told_done(self.channel, orders)
            self._work()

        self.request = Request(self, Settle(None, self.id, ranges(tags), outcome), answered)

    def _commit(self, tags: tuple[int, ...]) -> None:
        rng = self.world.random
        inputs = [self.held[tag] for tag in tags]
        names = [item.payload for item in inputs]
        deadline = self.world.now + rng.uniform(0.1, 3) if rng.random() < 0.3 else None
        first = self.sequence
        self.sequence += len(inputs)

        def answered(command: object) -> None:
            if isinstance(command, Accepted):
                self.world.check.told_accepted("out", names)
                self.world.check.told_done("in", [item.order for item in inputs])
            elif isinstance(command, Refused) and command.reason is Refusal.FULL:
                self._later(0.1, self._unless_lost(self._settle))
                return
            elif isinstance(command, Refused) and command.reason is Refusal.STANDSTILL:
                self._let_go(tags, Outcome.REJECTED)
                return
            for tag in tags:
                self.held.pop(tag, None)
            self.begun = set()
            self._work()

        outputs = runs_of([Thing(i.payload, i.weight, None, i.nbytes) for i in inputs])
        put = Put(0, self.id, first, outputs, deadline, atomic=True)
        commit = Commit(self.channel, "out", self.id, ranges(tags), put)
        numbers = first, self.sequence - 1
        self.request = Request(self, commit, answered, numbers)
        fate = rng.random()
        if fate < 0.15 and self.deaths_left:
            self.deaths_left -= 1
            self._later(rng.random(), self._die)
        if (
            fate > 1 - self.world.troubles.silence
        ):  # if it has to wait for room, the lease may run out meanwhile
            self.silent, self.faithful = True, False

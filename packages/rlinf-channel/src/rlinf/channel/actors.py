"""The actors of the simulation: producers on a bad network, consumers that fail in every way."""

from collections.abc import Callable
from dataclasses import replace

from rlinf.channel.messages import (
    Accepted,
    Cancel,
    ClientId,
    Command,
    Commit,
    Delivered,
    Item,
    Outcome,
    Put,
    Recalled,
    Refusal,
    Refused,
    Renew,
    Settle,
    Settled,
    Take,
)
from rlinf.channel.simulation import MAX_NBYTES, World

Act = Callable[[], None]


def populate(world: World) -> None:
    """Some producers and consumers of ``in``, of which some commit to ``out``, and one of ``out``.

    Whoever takes from ``in`` counts as a producer of ``out``, so ``out`` closes after ``in``.
    """
    rng = world.random
    for number in range(rng.randint(1, 3)):
        Producer(world, number, rng.randint(1, 8))
    for number in range(rng.randint(1, 3)):
        Consumer(world, "in", number, commits=rng.random() < 0.5)
    Consumer(world, "out", 9, commits=False)


class Producer:
    """Puts numbered items in messages that get lost, repeated and overtaken, until answered."""

    def __init__(self, world: World, number: int, items: int) -> None:
        self.world = world
        self.id = ClientId(f"producer/{number}", 1, 0)
        self.left = items
        self.sent = 0
        self.unanswered = 0
        world.join("in")
        world.later(world.random.random(), self._produce)

    def _produce(self) -> None:
        rng = self.world.random
        size = min(rng.choice([1, 1, 2, 3]), self.left)
        message = _Message(self, self.sent, size)
        self.sent += size
        self.left -= size
        self.unanswered += 1
        message.send()
        if self.left:
            self.world.later(rng.random() * 0.5, self._produce)

    def answered(self, taken: list[str]) -> None:
        """One message has its answer."""
        self.world.accepted.update(taken)
        self.unanswered -= 1
        if not self.left and not self.unanswered:
            self.world.leave("in")


class _Message:
    """One put, sent again and again while no answer has come: the numbers make that harmless."""

    def __init__(self, producer: Producer, first: int, size: int) -> None:
        self.world = world = producer.world
        self.producer = producer
        rng = world.random
        self.first = first
        self.names = [f"{producer.id.worker}:{first + offset}" for offset in range(size)]
        self.shapes = [
            (
                rng.choice([1.0, 2.5, 7.0]),
                rng.choice([None, None, "a", "b"]),
                rng.randint(1, MAX_NBYTES),
            )
            for _ in range(size)
        ]
        self.deadline = world.now + rng.uniform(1, 8) if rng.random() < 0.2 else None
        self.answered = False

    def send(self) -> None:
        """Once or twice, each copy lost or delayed on its own; and again if need be."""
        if self.answered:
            return
        rng = self.world.random
        for _ in range(rng.choice([1, 1, 1, 2])):
            if rng.random() >= self.world.loss:
                self.world.later(rng.random() * 0.3, self._arrive)
        self.world.later(1.0, self.send)

    def _arrive(self) -> None:
        pairs = zip(self.names, self.shapes, strict=True)
        items = [Item(name, *shape) for name, shape in pairs]
        self.world.tell(f"{self.producer.id} puts {self.names}")
        request = self.world.request(self._answer)
        put = Put(request, self.producer.id, self.first, items, self.deadline)
        self.world.step("in", put)

    def _answer(self, command: Command) -> None:
        if self.answered or self.world.random.random() < self.world.loss:
            return
        self.answered = True
        if isinstance(command, Accepted):
            taken = self.names
        else:
            assert isinstance(command, Refused) and command.reason is Refusal.FULL, command
            assert self.deadline is not None and self.deadline <= self.world.now
            taken = self.names[: command.accepted]
        self.producer.answered(taken)


class Consumer:
    """Takes in every way there is; then works, returns, commits, pauses too long, or crashes."""

    def __init__(self, world: World, channel: str, number: int, *, commits: bool) -> None:
        self.world = world
        self.channel = channel
        self.commits = commits
        self.id = ClientId(f"consumer/{number}", 0, 0)
        self.crashes_left = 2
        self.silent = False
        self.sequence = 0
        self.held: dict[int, Item] = {}
        self.begun: set[int] = set()
        if channel == "in":
            world.join("out")
        self._start()

    # Life

    def _start(self) -> None:
        self.id = ClientId(self.id.worker, self.id.epoch + 1, 0)
        self.held, self.begun, self.sequence, self.silent = {}, set(), 0, False
        self.world.recalls[self.id] = self._recalled
        self.world.later(self.world.random.random() * 0.5, self._alive(self._take))
        self._renew()

    def _alive(self, act: Act) -> Act:
        """`act`, unless this incarnation has ended by then."""
        epoch = self.id.epoch
        return lambda: act() if self.id.epoch == epoch else None

    def _crash(self) -> None:
        self.crashes_left -= 1
        dead = self.id
        self.id = ClientId(dead.worker, dead.epoch, -1)
        self.world.crash(dead)
        self.id = dead
        self._start()

    def _renew(self) -> None:
        if self.held and not self.silent:
            self.world.step(self.channel, Renew(None, self.id, tuple(self.held)))
        if self.sequence >= 0:
            self.world.later(self.world.config.lease_s / 3, self._alive(self._renew))

    def _end(self) -> None:
        self.sequence = -1
        if self.channel == "in":
            self.world.leave("out")

    # Taking

    def _take(self) -> None:
        rng, now = self.world.random, self.world.now
        deadline = now + rng.uniform(0.05, 3) if rng.random() < 0.4 else None
        request = self.world.request(lambda command: None, deadline)
        take = rng.choice(
            [
                Take(request, self.id, 1, None, False, None, deadline),
                Take(request, self.id, rng.randint(2, 5), None, False, None, deadline),
                Take(request, self.id, rng.randint(2, 4), None, True, None, deadline),
                Take(request, self.id, None, rng.uniform(1, 12), True, None, deadline),
                Take(request, self.id, 3, rng.uniform(1, 12), True, None, deadline),
                Take(request, self.id, 3, wait=False),
            ]
        )
        if deadline is not None and rng.random() < 0.2:
            take = Take(request, self.id, 1, None, False, "a", deadline)
        elif deadline is not None and rng.random() < 0.1:
            take = Take(request, self.id, None, None, True, None, deadline)
        if self.begun:
            take = replace(take, done=self._finish(tuple(self.begun)))
        self._ask(take)

    def _finish(self, tags: tuple[int, ...]) -> tuple[int, ...]:
        """Have an effect on what is still ours."""
        self.begun = set()
        for item in [self.held.pop(tag) for tag in tags]:
            if self._let_go(item):
                self.world.effect(self.channel, str(item.payload))
        return tags

    def _ask(self, take: Take) -> None:
        epoch = self.id.epoch

        def answer(command: Command) -> None:
            if self.id.epoch == epoch and self.id.number == 0:
                self._answered(take, command)

        self.world.redirect(take.request, answer)
        self.world.tell(f"{self.id} takes {take}")
        self.world.step(self.channel, take)
        if self.world.random.random() < 0.1:
            cancel = Cancel(take.request)
            self.world.later(0.1, lambda: self.world.step(self.channel, cancel))

    def _answered(self, take: Take, command: Command) -> None:
        if isinstance(command, Delivered) and command.items:
            tags = range(command.first_tag, command.first_tag + len(command.items))
            self.held = dict(zip(tags, command.items, strict=True))
            self.begun = set(tags) if take.full else set()
            self._choose_fate()
        elif command == Refused(take.request, Refusal.CLOSED) and take.key is None:
            self._end()
        else:
            assert not isinstance(command, Accepted | Settled), command
            self.world.later(self.world.random.random() * 0.2, self._alive(self._take))

    # Working

    def _choose_fate(self) -> None:
        rng, lease_s = self.world.random, self.world.config.lease_s
        fate = rng.random()
        self.silent = False
        if fate < 0.15 and self.crashes_left:
            self.world.later(rng.random(), self._alive(self._crash))
        elif fate < 0.3:
            self.silent = True
            self.world.tell(f"{self.id} falls silent")
            self.begun.update(self.held)
            self.world.later(lease_s * rng.uniform(0.5, 2.5), self._alive(self._work))
        else:
            self._work()

    def _work(self) -> None:
        """Work on what has been begun, or else on the next item."""
        self.silent = False
        if not self.held:
            self.world.later(self.world.random.random() * 0.2, self._alive(self._take))
            return
        if not self.begun:
            self.begun = {min(self.held)}
        seconds = self.world.random.random() * 1.5 * self.world.config.lease_s
        self.world.later(seconds, self._alive(self._settle))

    def _recalled(self) -> None:
        tags = tuple(tag for tag in self.held if tag not in self.begun)
        for tag in tags:
            self._let_go(self.held.pop(tag))
        self.world.tell(f"{self.id} gives back {tags}")
        self.world.step(self.channel, Recalled(self.id, tags))

    def _settle(self) -> None:
        tags = tuple(sorted(self.begun))
        if self.commits and self.channel == "in":
            self._commit(tags)
            return
        if len(tags) == len(self.held) and self.world.random.random() < 0.4:
            self.world.later(0.05, self._alive(self._take))  # the take itself acknowledges
            return
        self.begun = set()
        items = [self.held.pop(tag) for tag in tags]
        outcome = Outcome.RETURNED if self.world.random.random() < 0.15 else Outcome.DONE
        mine = [item for item in items if self._let_go(item)]
        if outcome is Outcome.DONE:
            for item in mine:
                self.world.effect(self.channel, str(item.payload))
        self.world.tell(f"{self.id} settles {tags} as {outcome.value}")

        def answer(command: Command) -> None:
            assert isinstance(command, Settled) and command.lost == len(items) - len(mine), command

        request = self.world.request(answer)
        self.world.step(self.channel, Settle(request, self.id, tags, outcome))
        self._work()

    def _commit(self, tags: tuple[int, ...]) -> None:
        inputs = [self.held[tag] for tag in tags]
        outputs = [Item(i.payload, i.weight, None, i.nbytes) for i in inputs]
        rng, id_ = self.world.random, self.id
        deadline = self.world.now + rng.uniform(0.1, 3) if rng.random() < 0.3 else None

        def answer(command: Command) -> None:
            self.world.tell(f"{id_} (epoch {id_.epoch}) commit {tags}: {command}")
            if isinstance(command, Accepted):
                for item in inputs:
                    self.world.effect("in", str(item.payload))
                    assert self.world.holders.pop(("in", str(item.payload)), None) == id_
            if self.id == id_:
                self._committed(tags, command)

        request = self.world.request(answer, deadline)
        put = Put(request, id_, self.sequence, outputs, deadline, atomic=True)
        self.sequence += len(outputs)
        fate = rng.random()
        if fate < 0.15 and self.crashes_left:
            self.world.later(rng.random(), self._alive(self._crash))
        self.silent = fate > 0.85  # if it has to wait for room, the lease may run out meanwhile
        self.world.step("in", Commit("in", "out", id_, tags, put))

    def _committed(self, tags: tuple[int, ...], command: Command) -> None:
        if isinstance(command, Refused) and command.reason is Refusal.FULL:
            self.world.later(0.1, self._alive(self._settle))
            return
        self.begun = set()
        for tag in tags:
            self.held.pop(tag, None)
        self._work()

    def _let_go(self, item: Item) -> bool:
        """Whether this consumer, by the world's own record, still held the item."""
        where = (self.channel, str(item.payload))
        if self.world.holders.get(where) != self.id:
            return False
        del self.world.holders[where]
        return True

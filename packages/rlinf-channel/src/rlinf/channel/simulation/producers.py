"""Producers of the simulation: numbered puts, sent until they are answered."""

from rlinf.channel.messages import Accepted, ClientId, Put, Refusal, Refused, Resume
from rlinf.channel.simulation.checks import MAX_NBYTES
from rlinf.channel.simulation.clients import AGAIN_S, NOBODY, Client
from rlinf.channel.simulation.things import Thing, runs_of
from rlinf.channel.simulation.world import World


class Producer(Client):
    """Puts numbered items in messages that are sent until they are answered."""

    def __init__(self, world: World, number: int, items: int) -> None:
        super().__init__(world)
        self.id = ClientId(f"producer/{number}", 1, 0)
        self.left = items
        self.sent = 0
        self.outstanding: dict[int, _Message] = {}
        world.join("in")
        world.later(world.random.random() * 0.3, self._produce)

    def _produce(self) -> None:
        rng = self.world.random
        size = min(rng.choice([1, 1, 2, 3, 5]), self.left)
        message = self.outstanding[self.sent] = _Message(self, self.sent, size)
        self.sent += size
        self.left -= size
        message.send()
        if self.left:
            self.world.later(rng.random() * 0.5, self._produce)

    def resumption(self) -> tuple[str, Resume]:
        """See `Client`."""
        numbers = [
            n for m in self.outstanding.values() for n in (m.first, m.first + len(m.items) - 1)
        ]
        return "in", Resume(self.id, self.sent, tuple(numbers))

    def back(self) -> None:
        """See `Client`."""
        for message in list(self.outstanding.values()):
            message.post()

    def settled(self, message: "_Message") -> None:
        """One message has its answer."""
        del self.outstanding[message.first]
        if not self.left and not self.outstanding:
            self.id = NOBODY
            self.world.clients.remove(self.notice)
            self.world.leave("in")


class _Message:
    """One put, sent again and again while no answer has come: the numbers make that harmless."""

    def __init__(self, producer: Producer, first: int, size: int) -> None:
        self.world = world = producer.world
        self.producer = producer
        self.first = first
        self.answered = False
        rng = world.random
        keys: list[str | None] = rng.choice([[None], [None], ["a"], ["b"], [None, "a"]])
        self.items = [
            Thing(
                f"{producer.id.worker}:{first + offset}",
                rng.choice([1.0, 2.5, 7.0]),
                rng.choice(keys),
                rng.randint(1, MAX_NBYTES),
            )
            for offset in range(size)
        ]
        self.deadline = world.now + rng.uniform(1, 8) if rng.random() < 0.2 else None

    def send(self) -> None:
        """Send, and again if need be."""
        if not self.answered:
            self.post()
            self.world.later(AGAIN_S, self.send)

    def post(self) -> None:
        """Send once."""
        if self.producer.ready:
            put = Put(0, self.producer.id, self.first, runs_of(self.items), self.deadline)
            self.world.send(put, "in", self._answer, self.producer.to)

    def _answer(self, command: object) -> None:
        if self.producer.answered_by_another(command) or self.answered:
            return
        self.answered = True
        names = [item.payload for item in self.items]
        check = self.world.check
        if isinstance(command, Accepted):
            check.told_accepted("in", names)
        else:
            assert isinstance(command, Refused), command
            if command.reason is not Refusal.STANDSTILL:
                assert command.reason is Refusal.FULL, command
                assert self.deadline is not None and self.deadline <= self.world.now
            check.told_accepted("in", names[: command.accepted])
            check.refused.update(names[command.accepted :])
        self.producer.settled(self)

"""A queue with a clock: what the tests of the queue drive."""

from collections.abc import Iterable
from itertools import count

from rlinf.channel.batching import Crate
from rlinf.channel.cargo import Cargo
from rlinf.channel.config import ChannelConfig
from rlinf.channel.core import Queue
from rlinf.channel.loading import Loading
from rlinf.channel.messages import (
    ClientId,
    Close,
    Command,
    Delivered,
    Event,
    Outcome,
    Put,
    Refusal,
    Refused,
    Settle,
    Take,
)
from rlinf.channel.run import Run
from rlinf.channel.simulation.things import things_of
from rlinf.channel.spans import ranges

P = ClientId("producer/0", 1, 0)
A, B = ClientId("consumer/0", 1, 0), ClientId("consumer/1", 1, 0)


class Driver:
    """A queue, a clock, and request numbers."""

    def __init__(self, **config: object) -> None:
        self.queue = Queue("q", ChannelConfig(**config))
        self.now = 0.0
        self.numbers = count(1)
        self.sequence = 0

    def step(self, event: Event) -> list[Command]:
        return self.queue.step(event, self.now)

    def put(self, *names, weight=1.0, key=None, nbytes=1, deadline=None) -> list[Command]:
        run = Run(names, weight, nbytes, key, len(names))
        first = self.sequence
        self.sequence += len(names)
        return self.step(Put(next(self.numbers), P, first, [run], deadline))

    def take(self, consumer=A, **wish) -> list[Command]:
        number = next(self.numbers)
        return self.step(Take(number, consumer, **{"ask": number, **wish}))

    def batch(self, consumer=A, max_items=None, target=None, **wish) -> list[Command]:
        return self.take(consumer, max_items=max_items, target_weight=target, full=True, **wish)

    def settle(self, tags, consumer=A, outcome=Outcome.DONE) -> list[Command]:
        return self.step(Settle(next(self.numbers), consumer, ranges(tags), outcome))

    def close(self) -> list[Command]:
        return self.step(Close(next(self.numbers)))


def names(commands: list[Command]) -> list[object]:
    return [i.payload for c in commands if isinstance(c, Delivered) for i in things_of(c.runs)]


def refusals(commands: list[Command]) -> list[Refusal]:
    return [c.reason for c in commands if isinstance(c, Refused)]


def close(rows: Iterable[tuple[Cargo, float, str | None]]) -> Crate:
    """A message of closed items with their weights and keys."""
    loading = Loading()
    for cargo, weight, key in rows:
        loading.add(cargo, weight, key)
    return loading.crate()


def item(payload: object, weight: float = 1.0) -> Run:
    """One item of one byte."""
    return Run((payload,), weight, 1)

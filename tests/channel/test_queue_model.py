"""The queue against a deque: the same answers to the same calls, as long as nothing fails."""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlinf.channel.config import ChannelConfig
from rlinf.channel.core import Queue
from rlinf.channel.messages import (
    Accepted,
    ClientId,
    Close,
    Delivered,
    Outcome,
    Put,
    Settle,
    Take,
)
from rlinf.channel.run import Run
from rlinf.channel.simulation.things import things_of
from rlinf.channel.spans import Spans
from rlinf.channel.testing import DequeModel
from tests.channel.driver import item

PRODUCER, CONSUMER = ClientId("p/0", 1, 0), ClientId("c/0", 1, 0)


class Comparison(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = DequeModel()
        self.queue = Queue("q", ChannelConfig())
        self.requests = count(1)
        self.sequence = count()
        self.tags = Spans()

    @rule(weight=st.integers(1, 9))
    def put(self, weight: int) -> None:
        name = next(self.sequence)
        run = item(name, float(weight))
        commands = self.queue.step(Put(next(self.requests), PRODUCER, name, [run]), 0.0)
        assert isinstance(commands[0], Accepted) == self.model.put(name, float(weight))

    @rule(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), key=st.sampled_from("ab"))
    def put_several(self, weights: list[int], key: str) -> None:
        names = [next(self.sequence) for _ in weights]
        run = Run(names, [float(w) for w in weights], 1, key, len(names))
        put = Put(next(self.requests), PRODUCER, names[0], [run])
        commands = self.queue.step(put, 0.0)
        taken = [self.model.put(n, float(w)) for n, w in zip(names, weights, strict=True)]
        assert isinstance(commands[0], Accepted) == all(taken)

    @rule(max_items=st.none() | st.integers(1, 5), most=st.none() | st.integers(1, 20))
    def take(self, max_items: int | None, most: int | None) -> None:
        take = Take(
            next(self.requests),
            CONSUMER,
            max_items,
            None if most is None else float(most),
            full=True,
            wait=False,
        )
        (delivered,) = self.queue.step(take, 0.0)
        assert isinstance(delivered, Delivered)
        expected = self.model.take(max_items, None if most is None else float(most))
        assert [thing.payload for thing in things_of(delivered.runs)] == expected
        first = delivered.first_tag
        if expected:
            self.tags.add(first, first + len(expected) - 1)

    @rule(returned=st.booleans())
    def settle(self, returned: bool) -> None:
        outcome = Outcome.RETURNED if returned else Outcome.DONE
        (settled,) = self.queue.step(Settle(1, CONSUMER, self.tags.ranges(), outcome), 0.0)
        assert settled.lost == 0
        self.tags.clear()
        self.model.settle(returned)

    @rule()
    def close(self) -> None:
        self.queue.step(Close(), 0.0)
        self.model.closed = True

    @invariant()
    def same_depth(self) -> None:
        state = self.queue.statistics(0.0)
        assert state.depth == len(self.model.queued)
        assert state.leased_items == len(self.model.leased)


Comparison.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestQueueAgainstDeque = Comparison.TestCase

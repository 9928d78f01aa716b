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
    Item,
    Outcome,
    Put,
    Settle,
    Take,
)
from rlinf.channel.testing import DequeModel

PRODUCER, CONSUMER = ClientId("p/0", 1, 0), ClientId("c/0", 1, 0)


class Comparison(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = DequeModel()
        self.queue = Queue("q", ChannelConfig())
        self.requests = count(1)
        self.sequence = count()
        self.tags: list[int] = []

    @rule(weight=st.integers(1, 9))
    def put(self, weight: int) -> None:
        name = next(self.sequence)
        item = Item(name, float(weight), None, 1)
        commands = self.queue.step(Put(next(self.requests), PRODUCER, name, [item]), 0.0)
        assert isinstance(commands[0], Accepted) == self.model.put(name, float(weight))

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
        assert [item.payload for item in delivered.items] == expected
        first = delivered.first_tag
        self.tags += range(first, first + len(delivered.items))

    @rule(returned=st.booleans())
    def settle(self, returned: bool) -> None:
        outcome = Outcome.RETURNED if returned else Outcome.DONE
        (settled,) = self.queue.step(Settle(1, CONSUMER, self.tags, outcome), 0.0)
        assert settled.lost == 0
        self.tags = []
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

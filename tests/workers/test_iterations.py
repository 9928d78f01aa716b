"""When the channels of an iteration are forgotten."""

from dataclasses import dataclass, field

import pytest

from rlinf.channel import ChannelRef
from rlinf.workers.iterations import Iterations
from rlinf.workers.messages import Flow


@dataclass
class Kept:
    """What stands for a channel: says what was done to it."""

    ref: ChannelRef
    done: list[str] = field(default_factory=list)

    def close(self):
        self.done.append("close")

    def delete(self):
        self.done.append("delete")


@pytest.fixture
def made():
    channels = {name: Kept(ChannelRef(name, "channel/0")) for name in ("prompts", "samples")}
    iterations = Iterations(None, lambda number, because: None)
    iterations.add(0, channels.values())
    writing = Flow(channels["prompts"].ref, channels["samples"].ref, 0)
    reading = Flow(channels["samples"].ref, None, 0)
    iterations.begins(writing, [1])
    iterations.begins(reading, [2])
    return iterations, channels, writing, reading


def settled(iterations):
    iterations._settlers.submit(lambda: None).result(10)


def test_a_writer_that_has_not_answered_keeps_what_is_read(made):
    """It may be killed before it says that it closed its output, and is called again then."""
    iterations, channels, writing, reading = made
    iterations.ended(reading, [2])
    settled(iterations)
    assert channels["samples"].done == []
    iterations.ended(writing, [1], closed=True)
    settled(iterations)
    assert channels["samples"].done == ["delete"]
    assert channels["prompts"].done == ["delete"]


def test_the_last_of_several_writers_lets_go(made):
    iterations, channels, writing, reading = made
    iterations.begins(writing, [3])
    iterations.ended(reading, [2])
    iterations.ended(writing, [1], closed=True)
    settled(iterations)
    assert "delete" not in channels["samples"].done
    iterations.ended(writing, [3], closed=True)
    settled(iterations)
    assert channels["samples"].done == ["delete"]


def test_a_closed_channel_goes_when_its_reader_is_done(made):
    iterations, channels, writing, reading = made
    iterations.ended(writing, [1]).result(10)
    assert channels["samples"].done == ["close"]
    iterations.ended(reading, [2])
    settled(iterations)
    assert channels["samples"].done == ["close", "delete"]

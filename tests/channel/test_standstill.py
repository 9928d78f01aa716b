"""A put that waits for whoever waits for it is refused, and nobody else's is."""

import threading

import pytest

from rlinf.channel import Channel, ChannelClosed, ChannelConfig, Full, Standstill
from rlinf.channel.hub import Hub
from rlinf.channel.messages import (
    Commit,
    Outcome,
    Put,
    Refusal,
    Refused,
    Settle,
    Settled,
    Take,
    Tick,
)
from rlinf.channel.standstill import STANDSTILL_S
from rlinf.comm import Endpoint
from tests.channel.driver import A, B, Driver, P, item, names, refusals


def later(q: Driver, seconds: float = STANDSTILL_S) -> list[object]:
    q.now += seconds
    return q.step(Tick())


def full() -> Driver:
    """A channel of three bytes, all leased by A, and a put that waits."""
    q = Driver(buffer_size=3)
    q.put("a", "b", "c")
    assert names(q.batch(A, max_items=3)) == ["a", "b", "c"]
    assert q.put("d") == []
    return q


def test_a_put_is_refused_when_whoever_holds_all_bytes_waits_for_more():
    q = full()
    assert q.take(A, holds=3) == []
    assert later(q, STANDSTILL_S / 2) == [], "not before it is certain"
    assert q.queue.wake_at <= STANDSTILL_S, "nobody else has to come for it to be noticed"
    assert refusals(later(q)) == [Refusal.STANDSTILL]


def test_short_waits_one_after_the_other_are_a_wait():
    q = full()
    found: list[Refusal] = []
    while Refusal.STANDSTILL not in found:
        assert q.now < 5 * STANDSTILL_S
        found += refusals(q.take(A, holds=3, deadline=q.now + STANDSTILL_S / 2))
        found += refusals(later(q, STANDSTILL_S / 2))


def test_who_works_on_what_he_holds_will_make_room():
    q = full()
    assert q.take(B) == [] and refusals(later(q, 10.0)) == []
    q = full()
    assert q.take(A, holds=3, alone=False) == [], "another thread may be working"
    assert refusals(later(q, 10.0)) == []
    q.settle([0])
    assert names(q.settle([1])) == [], "the put came in with the first"
    assert len(q.queue) == 0 and q.queue.held == 2


def test_whoever_waits_for_everything_leaves_no_room():
    q = Driver(max_items=2)
    assert q.batch() == []
    q.put("a", "b")
    assert q.put("c") == []
    assert refusals(later(q)) == [Refusal.STANDSTILL]
    assert names(q.close()) == ["a", "b"]


def test_a_key_that_nobody_asks_for_may_still_be_asked_for():
    q = Driver(max_items=1)
    q.put("a", key="a")
    assert q.put("b", key="b") == []
    assert q.take(A, key="b") == []
    assert refusals(later(q)) == []
    assert sorted(names(q.take(B, key="a"))) == ["a", "b"]


def test_what_is_given_back_makes_room():
    q = full()
    q.settle([0, 1, 2], outcome=Outcome.RETURNED)
    assert names(q.take(A)) == ["a"] and refusals(later(q)) == []


def test_a_commit_that_waits_in_vain_is_refused_and_its_lease_goes_on():
    hub = Hub("s")
    for name in ("in", "out"):
        hub.create(name, ChannelConfig(buffer_size=2))
    hub.step("in", Put(1, P, 0, [item("a"), item("b")]), 0.0)
    hub.step("in", Take(2, A, max_items=2, full=True, ask=1), 0.0)
    hub.step("out", Put(3, P, 0, [item("c"), item("d")]), 0.0)
    hub.step("out", Take(4, B, max_items=2, full=True, ask=1), 0.0)
    hub.step("out", Take(5, B, ask=2, holds=2), 0.0)
    commit = Commit("in", "out", A, (0, 0), Put(6, A, 0, [item("A")], atomic=True))
    assert hub.commit(commit, 0.0) == []
    assert hub.tick(STANDSTILL_S) == [("out", Refused(6, Refusal.STANDSTILL))]
    assert hub.step("in", Settle(7, A, (0, 1)), STANDSTILL_S) == [("in", Settled(7))]


def test_the_put_is_told_who_holds_what_and_what_helps(
    name: str, here: Endpoint, there: Endpoint
) -> None:
    channel = Channel.create(name, here, ChannelConfig(buffer_size=2000, put_window_items=0))
    greedy = channel.ref.open(there)
    channel.put_many([bytes(900), bytes(900)])
    refused: list[Standstill] = []

    def put() -> None:
        with pytest.raises(Standstill) as caught:
            channel.put(bytes(900), timeout=None)
        refused.append(caught.value)
        channel.close()

    with greedy.lease_batch(max_items=2) as step:
        putting = threading.Thread(target=put)
        putting.start()
        with pytest.raises(ChannelClosed):
            greedy.get(timeout=30.0)
    putting.join()
    (error,) = refused
    words = str(error)
    assert isinstance(error, Full) and name in words and "1800 of 2000 bytes" in words
    assert "leased: 2 by there/0#" in words and "buffer_size" in words and len(step) == 2

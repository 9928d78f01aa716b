"""The pure queue, one behaviour a test; case numbers are those of the channel cases."""

import math

from rlinf.channel.config import ChannelConfig
from rlinf.channel.hub import Hub
from rlinf.channel.journal import ServerState
from rlinf.channel.messages import (
    Accepted,
    Cancel,
    ClientId,
    Delivered,
    Gone,
    Outcome,
    Put,
    Refusal,
    Refused,
    Released,
    Renew,
    Settle,
    Settled,
    Take,
    Tick,
)
from rlinf.channel.run import Run
from tests.channel.driver import A, B, Driver, P, item, names, refusals


def test_items_come_in_the_order_they_were_put():
    q = Driver()
    q.put("a", "b")
    q.put("c")
    assert names(q.take() + q.take() + q.take()) == ["a", "b", "c"]


def test_a_take_waits_for_a_put():
    q = Driver()
    assert q.take() == []
    (delivered, accepted) = sorted(q.put("a"), key=lambda c: type(c).__name__, reverse=True)
    assert names([delivered]) == ["a"] and isinstance(accepted, Accepted)


def test_q1_the_tail_of_a_closed_channel_is_a_batch():
    q = Driver()
    assert q.batch(target=3.0) == []
    q.put("a", "b")
    assert q.queue.statistics(0.0).depth == 2, "a batch that is not complete takes nothing"
    assert names(q.close()) == ["a", "b"]


def test_q1_a_closed_and_drained_channel_says_so():
    q = Driver()
    q.close()
    assert refusals(q.batch(target=3.0)) == [Refusal.CLOSED]


def test_q2_an_item_heavier_than_the_target_comes_alone():
    q = Driver()
    q.put("heavy", weight=10.0)
    q.put("light")
    assert names(q.batch(target=3.0)) == ["heavy"]


def test_a_batch_ends_before_its_target_is_exceeded():
    q = Driver()
    q.put("a", "b", weight=2.0)
    assert names(q.batch(target=3.0)) == ["a"]


def test_weights_that_do_not_add_up_exactly_still_complete_a_batch():
    q = Driver()
    q.put(*range(10), weight=0.1)
    assert len(names(q.batch(target=1.0))) == 10


def test_whichever_bound_comes_first_completes_a_batch():
    q = Driver()
    q.put(*range(9))
    assert names(q.batch(max_items=2, target=5.0)) == [0, 1]
    assert names(q.batch(max_items=5, target=3.0)) == [2, 3, 4]


def test_everything_until_close():
    q = Driver()
    assert q.batch() == []
    q.put("a", "b")
    q.put("c")
    assert names(q.close()) == ["a", "b", "c"]


def test_a_batch_larger_than_the_bound_is_what_fits():
    q = Driver(max_items=2)
    q.put("a", "b", "c", "d")
    assert names(q.batch(max_items=3)) == ["a", "b"]
    assert names(q.batch(max_items=3)) == [], "c and d fit: nobody waits for room any more"
    assert names(q.close()) == ["c", "d"]


def test_a_batch_whose_time_is_up_leaves_every_item():
    q = Driver()
    q.put("a")
    q.batch(max_items=2, deadline=5.0)
    q.now = q.queue.wake_at
    assert q.now == 5.0
    assert refusals(q.step(Tick())) == [Refusal.TIMEOUT]
    assert names(q.take()) == ["a"]


def test_a_cancelled_batch_leaves_every_item():
    q = Driver()
    q.put("a")
    q.step(Take(99, A, 2, full=True))
    assert refusals(q.step(Cancel(99))) == [Refusal.CANCELLED]
    assert names(q.take()) == ["a"]


def test_keys_are_lanes_of_their_own():
    q = Driver()
    q.put("x1", key="x")
    q.put("y1", key="y")
    q.put("x2", key="x")
    assert names(q.take(key="y")) == ["y1"]
    assert names(q.take()) == ["x1"]
    assert q.take(key="y") == []
    assert names(q.take(key="x")) == ["x2"]


def test_q7_a_lost_consumers_items_go_back_to_the_front():
    q = Driver()
    q.put("a", "b", "c")
    q.batch(max_items=2)
    (released,) = q.step(Gone(A.worker, A.epoch))
    assert released == Released(A, (0, 1))
    assert names(q.batch(B, max_items=3)) == ["a", "b", "c"]
    assert q.queue.statistics(0.0).redelivered_items == 2


def test_q7_a_lease_that_runs_out_gives_the_items_back():
    q = Driver(lease_s=10.0)
    q.put("a")
    q.take(A)
    q.take(B)
    q.now = q.queue.wake_at
    commands = q.step(Tick())
    assert q.now == 10.0 and commands[0] == Released(A, (0, 0), expired=True)
    assert names(commands) == ["a"]


def test_a_sign_of_life_renews_the_lease():
    q = Driver(lease_s=10.0)
    q.put("a")
    q.take(A)
    q.now = 9.0
    q.step(Renew(None, A, (0, 0)))
    q.now = 11.0
    assert q.step(Tick()) == []
    assert q.queue.wake_at == 19.0


def test_what_a_living_consumer_does_not_know_it_holds_comes_back():
    q = Driver(lease_s=10.0)
    q.put("a", "b")
    q.take(A)
    q.take(A)
    q.now = 1.0
    assert q.step(Renew(None, A, (1, 1))) == [], "its delivery may still be on the way"
    q.now = 6.0
    assert q.step(Renew(None, A, (1, 1))) == [Released(A, (0, 0), expired=True)]


def test_settling_what_is_lost_says_how_much():
    q = Driver()
    q.put("a")
    q.take(A)
    q.step(Gone(A.worker, A.epoch))
    (settled,) = q.settle((0,))
    assert isinstance(settled, Settled) and settled.lost == 1


def test_rejected_items_are_counted_and_not_delivered_again():
    q = Driver()
    q.put("a", "b")
    q.take()
    q.settle((0,), outcome=Outcome.REJECTED)
    state = q.queue.statistics(0.0)
    assert (state.rejected_items, state.acknowledged_items, state.depth) == (1, 0, 1)


def test_returned_items_take_their_old_places():
    q = Driver()
    q.put(*range(6))
    q.batch(A, max_items=2)
    q.batch(B, max_items=2)
    q.settle((2, 3), B, Outcome.RETURNED)
    q.settle((0, 1), A, Outcome.RETURNED)
    assert names(q.batch(max_items=6)) == list(range(6))


def test_q11_a_full_channel_makes_producers_wait_and_evicts_nothing():
    q = Driver(max_items=2)
    assert isinstance(q.put("a", "b")[0], Accepted)
    assert q.put("c") == []
    assert q.queue.statistics(0.0).waiting_producers == 1
    commands = q.take()
    assert names(commands) == ["a"]
    assert [type(c) for c in commands] == [Delivered, Accepted]
    assert names(q.batch(max_items=2)) == ["b", "c"]


def test_bytes_count_until_they_are_acknowledged():
    q = Driver(buffer_size=10)
    q.put("a", nbytes=8)
    assert q.put("b", nbytes=8) == []
    assert names(q.take()) == ["a"]
    assert len(q.queue) == 0, "the leased item still takes its room"
    assert isinstance(q.settle((0,))[1], Accepted)


def test_a_put_whose_time_is_up_is_refused_and_stays_refused():
    q = Driver(max_items=1)
    q.put("a")
    q.step(Put(50, P, 1, [item("b"), item("c")], deadline=3.0))
    q.take()
    q.now = q.queue.wake_at
    assert q.step(Tick()) == [Refused(50, Refusal.FULL, accepted=1)]
    repeated = Put(51, P, 1, [item("b"), item("c")], deadline=3.0)
    assert q.step(repeated) == [Refused(51, Refusal.FULL, accepted=1)]


def test_repeated_messages_are_dropped():
    q = Driver()
    put = Put(1, P, 0, [item("a")])
    q.step(put)
    assert isinstance(q.step(Put(2, P, 0, [item("a")]))[0], Accepted)
    assert q.queue.statistics(0.0).duplicate_items == 1
    assert names(q.take() + q.take()) == ["a"]


def test_messages_that_overtake_each_other_are_put_in_order():
    q = Driver()
    assert q.step(Put(1, P, 1, [item("b")])) == []
    commands = q.step(Put(2, P, 0, [item("a")]))
    assert [c.request for c in commands] == [2, 1]
    assert names(q.take() + q.take()) == ["a", "b"]


def test_producers_wait_in_one_line():
    q = Driver(buffer_size=10)
    q.put("a", nbytes=6)
    q.put("large", nbytes=9)
    other = ClientId("producer/1", 1, 0)
    assert q.step(Put(70, other, 0, [item("small")])) == []
    q.take()
    q.settle((0,))
    assert names(q.take() + q.take()) == ["large", "small"]


def test_close_keeps_what_waits_for_room_and_refuses_what_comes():
    q = Driver(max_items=1)
    q.put("a")
    q.put("b")
    q.close()
    assert refusals(q.put("c")) == [Refusal.CLOSED]
    assert names(q.take()) == ["a"]
    assert names(q.take(B)) == ["b"]
    assert q.take(B) == [], "what A holds may still come back"
    assert refusals(q.settle((0,))) == [Refusal.CLOSED]


def test_the_end_waits_for_items_others_hold():
    q = Driver()
    q.put("a")
    q.take(A)
    q.close()
    assert q.take(B) == []
    assert names(q.step(Gone(A.worker, A.epoch))) == ["a"]


def test_an_answer_at_once_is_an_answer_even_if_it_is_empty():
    q = Driver()
    (delivered,) = q.take(wait=False)
    assert isinstance(delivered, Delivered) and delivered.runs == []


def test_statistics_show_who_does_how_much():
    q = Driver()
    q.put("a", "b", weight=2.0)
    q.take(A)
    q.now = 4.0
    q.settle((0,))
    q.take(B)
    state = q.queue.statistics(6.0)
    first, second = state.consumers
    assert (first.finished_items, first.finished_weight, first.weight_per_s) == (1, 2.0, 0.5)
    assert first.idle_s == 2.0
    assert (second.leased_items, second.outstanding_weight) == (1, 2.0)
    assert state.balance == math.inf


def test_consumers_that_are_long_gone_do_not_pile_up() -> None:
    driver = Driver(lease_s=1.0)
    for number in range(100):
        driver.now += 1.0
        brief = ClientId("consumer/0", 1, number)
        driver.put(number)
        (given,) = [c for c in driver.take(brief) if isinstance(c, Delivered)]
        driver.settle([given.first_tag], brief)
    assert len(driver.queue.statistics(driver.now).consumers) <= 21


def test_a_settlement_asked_again_of_the_next_server_tells_the_same():
    hub = Hub("s", durable=True)
    hub.create("q", ChannelConfig())
    hub.step("q", Put(1, P, 0, [Run("ab", 1.0, 1, None, 2)]), 0.0)
    hub.step("q", Take(2, A, max_items=2, full=True), 0.0)
    hub.step("q", Settle(None, A, (1, 1), Outcome.RETURNED), 0.0)
    again = Settle(3, A, (0, 1))
    ((_, told),) = hub.step("q", again, 0.0)
    assert told == Settled(3, lost=1)
    state = ServerState()
    state.replay(hub.records())
    following = Hub("s", incarnation=1 << 20, durable=True)
    following.load(state.channels)
    assert following.step("q", again, 0.0) == [("q", told)]

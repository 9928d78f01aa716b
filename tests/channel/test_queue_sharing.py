"""What comes along ahead of demand, and is called back when others wait."""

import math

import pytest

from rlinf.channel.consumers import RECALL_AFTER_S
from rlinf.channel.messages import (
    Delivered,
    Recall,
    Recalled,
    Tick,
)
from tests.channel.driver import A, B, Driver, names


def test_one_asked_for_brings_along_its_share():
    q = Driver()
    q.put(*range(100))
    assert names(q.take(A, max_items=10)) == list(range(10))
    q.take(B, max_items=1)
    assert len(names(q.take(A, max_items=80))) == math.ceil(89 / 2)


def test_what_was_brought_along_is_called_back_when_others_wait():
    q = Driver()
    q.put("a", "b", "c")
    q.take(A, max_items=3)
    assert q.take(B) == [], "A has just got them"
    q.now = q.queue.wake_at
    assert q.now == pytest.approx(RECALL_AFTER_S)
    assert q.step(Tick()) == [Recall(A)]
    assert names(q.step(Recalled(A, (1, 2)))) == ["b"]
    state = q.queue.statistics(q.now)
    assert state.redelivered_items == 0 and state.depth == 1


def test_one_item_brought_along_is_called_back_until_it_comes():
    q = Driver()
    q.put("a")
    q.take(A, max_items=3, wait=False)
    q.take(B)
    for _ in range(3):
        q.now = q.queue.wake_at
        assert q.step(Tick()) == [Recall(A)]
        assert q.step(Recalled(A)) == [], "it was on its way when the question came"
    assert q.now < 1.0
    assert names(q.step(Recalled(A, (0, 0)))) == ["a"]


def test_who_got_what_it_asked_for_keeps_it():
    q = Driver()
    q.put("a", "b")
    q.take(A, max_items=3, wait=False)
    q.settle((0, 1))
    q.put("c")
    q.take(A)
    q.take(B)
    q.now = 20.0
    assert q.step(Tick()) == []


def test_whole_batches_come_along_as_far_as_the_share_goes() -> None:
    driver = Driver()
    driver.put(*range(11))
    assert names(driver.batch(max_items=3, along=6)) == list(range(9))
    driver.put(*range(11, 20))
    assert names(driver.batch(B, max_items=3, along=1)) == [9, 10, 11]
    assert names(driver.batch(B, max_items=3, along=6)) == [12, 13, 14], "half of it is for A"


def test_what_came_along_with_a_batch_is_recalled_for_others() -> None:
    driver = Driver()
    driver.put(*range(4))
    (given,) = driver.batch(max_items=2, along=2)
    assert isinstance(given, Delivered) and sum(run.count for run in given.runs) == 4
    driver.take(B)
    driver.now += RECALL_AFTER_S
    assert driver.step(Tick()) == [Recall(A)]
    tags = given.first_tag + 2, given.first_tag + 3
    assert names(driver.step(Recalled(A, tags))) == [2]


def test_a_batch_asked_for_ahead_is_recalled_for_others() -> None:
    driver = Driver()
    driver.put(*range(2))
    (given,) = driver.batch(max_items=2, wait=False)
    assert isinstance(given, Delivered) and sum(run.count for run in given.runs) == 2
    driver.take(B)
    driver.now += RECALL_AFTER_S
    assert driver.step(Tick()) == [Recall(A)]
    assert names(driver.step(Recalled(A, (given.first_tag, given.first_tag + 1)))) == [0]


def test_no_batch_ahead_where_there_is_no_whole_one() -> None:
    driver = Driver()
    driver.put(0)
    assert names(driver.batch(max_items=2, wait=False, along=2)) == []
    assert names(driver.batch(max_items=2, wait=False)) == []
    driver.close()
    assert names(driver.batch(max_items=2, wait=False)) == [0], "the tail"

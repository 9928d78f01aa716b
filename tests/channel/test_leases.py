"""Leases, commits and what comes along: what a consumer holds, and until when."""

import threading

import pytest

from rlinf.channel import (
    Channel,
    ChannelClosed,
    ChannelConfig,
    Full,
    LeaseLost,
    Timeout,
)
from rlinf.channel.spans import ranges
from rlinf.comm import Endpoint
from rlinf.comm.testing import eventually

BRIEF_S = 0.15


def test_get_acknowledges_the_one_before(channel: Channel, other: Channel) -> None:
    channel.put_many("ab")
    other.get()
    channel.flush()
    assert channel.statistics().acknowledged_items == 0
    other.get()
    other.ack()
    assert channel.statistics().acknowledged_items == 2


def test_a_lease_is_acknowledged_by_a_clean_end(channel: Channel, other: Channel) -> None:
    channel.put("a")
    with other.lease() as item:
        assert item == "a"
    assert channel.statistics().acknowledged_items == 1


def test_a_lease_is_returned_by_an_exception(channel: Channel, other: Channel) -> None:
    channel.put_many("ab")
    with pytest.raises(ZeroDivisionError), other.lease() as item:
        assert item == "a"
        raise ZeroDivisionError
    assert other.get() == "a" and other.get() == "b"
    assert channel.statistics().redelivered_items == 1


def test_a_lease_of_everything_waits_for_close(channel: Channel, other: Channel) -> None:
    channel.put_many("ab")
    closer = threading.Timer(BRIEF_S, channel.close)
    closer.start()
    with other.lease_batch() as lease:
        assert list(lease) == ["a", "b"]
    closer.join()


def test_commit_moves_items_from_channel_to_channel(channel: Channel, name: str, here) -> None:
    target = Channel.create(f"{name}-out", here)
    channel.put_many([1, 2, 3])
    with channel.lease_batch(max_items=3) as lease:
        lease.commit_items([1], [(20, 1.0)], target)
        assert lease.held == (0, 2)
        assert channel.statistics().acknowledged_items == 1
        lease.commit([(10, 1.0), (30, 2.0)], target)
    assert [target.get() for _ in range(3)] == [20, 10, 30]
    assert channel.statistics().acknowledged_items == 3


def test_commit_waits_for_room_and_is_all_or_nothing(channel: Channel, name: str, here) -> None:
    target = Channel.create(f"{name}-out", here, ChannelConfig(max_items=2))
    target.put("old")
    channel.put("in")
    with channel.lease_batch(max_items=1) as lease:
        with pytest.raises(Full):
            lease.commit([("x", 1.0), ("y", 1.0)], target, timeout=BRIEF_S)
        assert target.qsize() == 1 and channel.statistics().acknowledged_items == 0
        assert target.get() == "old"
        lease.commit([("x", 1.0), ("y", 1.0)], target)
    assert target.get_batch(max_items=2) == ["x", "y"]


def test_commit_to_a_closed_channel_keeps_the_lease(channel: Channel, name: str, here) -> None:
    target = Channel.create(f"{name}-out", here)
    target.close()
    channel.put("in")
    with pytest.raises(ChannelClosed), channel.lease_batch(max_items=1) as lease:
        lease.commit([("x", 1.0)], target)
    assert channel.get() == "in"


def test_an_expired_lease_commits_nothing(name: str, here: Endpoint, there: Endpoint) -> None:
    config = ChannelConfig(lease_s=0.3)
    channel, target = Channel.create(name, here, config), Channel.create(f"{name}-out", here)
    other = channel.ref.open(there)
    channel.put("in")
    with channel.lease_batch(max_items=1) as lease:
        tags = ranges(tag for tag in lease._tags if tag is not None)
        channel._inbox.release(tags)  # as if this process had been stopped: it renews no more
        assert other.get() == "in"
        with pytest.raises(LeaseLost, match="drop their results"):
            lease.commit([("x", 1.0)], target)
        assert lease.held == ()
    assert target.qsize() == 0


def test_a_living_consumer_keeps_its_lease(name: str, here: Endpoint, there: Endpoint) -> None:
    channel = Channel.create(name, here, ChannelConfig(lease_s=0.3))
    other = channel.ref.open(there)
    channel.put("a")
    with other.lease() as item:
        with pytest.raises(Timeout):
            channel.get(timeout=1.0)
        assert item == "a"
    assert channel.statistics().redelivered_items == 0


def test_what_a_fast_consumer_brought_along_is_shared(channel: Channel, other: Channel) -> None:
    channel.put_many(range(1000))
    for _ in range(100):
        channel.get()
    eventually(lambda: channel.statistics().leased_items > 1)
    rest = [other.get() for _ in range(900)]
    assert sorted(rest) == list(range(100, 1000)), "given back: what was not begun, and only that"


def test_a_quick_consumer_is_brought_whole_batches_ahead(
    channel: Channel, other: Channel, there: Endpoint
) -> None:
    count, size = 2048, 16
    channel.put_many(range(count))
    channel.flush()
    sent = there.statistics().sent
    got = [item for _ in range(count // size) for item in other.get_batch(max_items=size)]
    assert got == list(range(count))
    assert there.statistics().sent - sent < count // size / 2, "not a request for each batch"
    other.ack()
    assert channel.statistics().acknowledged_items == count


def test_batches_of_another_size_and_single_gets_keep_the_order(
    channel: Channel, other: Channel
) -> None:
    channel.put_many(range(200))
    channel.close()
    sizes = [4, 4, 4, 4, 1, 9, 2, 30, 7, 50, 3]
    got = [item for size in sizes for item in other.get_batch(max_items=size)]
    got += [other.get(), *other.get_batch(target_weight=5.0), *other.get_batch(max_items=4)]
    got += list(other)
    assert got == list(range(200))

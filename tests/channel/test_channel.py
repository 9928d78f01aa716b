"""Channels between endpoints of one process: what the door promises."""

import asyncio
import math
import pickle
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rlinf.channel import (
    Channel,
    ChannelBusy,
    ChannelClosed,
    ChannelConfig,
    ChannelRef,
    ChannelServer,
    ChannelUnknown,
    ConfigMismatch,
    Full,
    InvalidConfig,
    InvalidWeight,
    ItemTooLarge,
    LeaseLost,
    PolicyUnknown,
    ServerLost,
    Timeout,
)
from rlinf.channel.testing import Rig
from rlinf.comm import Endpoint, EndpointClosed
from rlinf.comm.errors import Cancelled, CodecError
from rlinf.comm.testing import eventually

BRIEF_S = 0.15


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("inproc") as rig:
        yield rig


@pytest.fixture(scope="module")
def server(rig: Rig) -> Iterator[ChannelServer]:
    with rig.server() as server:
        yield server


@pytest.fixture
def here(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("here/0") as endpoint:
        yield endpoint


@pytest.fixture
def there(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("there/0") as endpoint:
        yield endpoint


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def channel(name: str, here: Endpoint) -> Channel:
    return Channel.create(name, here)


@pytest.fixture
def other(channel: Channel, there: Endpoint) -> Channel:
    return channel.ref.open(there)


def test_objects_come_out_as_they_went_in(channel: Channel, other: Channel) -> None:
    items = [b"raw", "text", 7, None, {"a": np.arange(5), "b": [1, (2, 3)]}, np.zeros((500, 500))]
    for item in items:
        channel.put(item)
    for item in items:
        got = other.get()
        assert type(got) is type(item)
        if isinstance(item, dict):
            assert got["b"] == item["b"] and (got["a"] == item["a"]).all()
        elif isinstance(item, np.ndarray):
            assert (got == item).all()
        else:
            assert got == item


def test_an_item_may_be_changed_once_it_was_put(channel: Channel, other: Channel) -> None:
    small, large = np.zeros(4), np.zeros(1 << 18)
    channel.put(small)
    channel.put(large)
    small[:], large[:] = 1, 1
    assert other.get().sum() == 0 and other.get().sum() == 0


def test_small_items_arrive_in_memory_of_their_own(channel: Channel, other: Channel) -> None:
    channel.put_many([np.zeros(4), np.zeros(4)])
    first, second = other.get(), other.get()
    first[:] = 7
    assert second.sum() == 0


def test_order_is_kept_over_many_puts_and_gets(channel: Channel, other: Channel) -> None:
    def produce() -> None:
        for number in range(3000):
            channel.put(number if number % 7 else np.full(3000, number))
        channel.close()

    thread = threading.Thread(target=produce)
    thread.start()
    got = [int(item if isinstance(item, int) else item[0]) for item in other]
    thread.join()
    assert got == list(range(3000))
    assert channel.statistics().acknowledged_items == 3000


def test_q1_get_batch_returns_the_tail(channel: Channel, other: Channel) -> None:
    channel.put_many(["a", "b"])
    channel.close()
    assert other.get_batch(target_weight=3.0) == ["a", "b"]
    with pytest.raises(ChannelClosed, match="closed and drained"):
        other.get_batch(target_weight=3.0)


def test_q2_a_heavy_item_comes_alone(channel: Channel, other: Channel) -> None:
    channel.put("heavy", weight=10.0)
    channel.put("light")
    assert other.get_batch(target_weight=3.0) == ["heavy"]


def test_q3_the_default_weight_is_one(channel: Channel, other: Channel) -> None:
    channel.put("a")
    assert other.get_batch(target_weight=1.0) == ["a"]


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf, "2"])
def test_q3_other_weights_are_refused_at_put(channel: Channel, weight: float) -> None:
    with pytest.raises(InvalidWeight) as caught:
        channel.put("a", weight=weight)
    assert caught.value.weight is weight


def test_q5_a_full_channel_in_one_process_says_so(name: str, here: Endpoint) -> None:
    channel = Channel.create(name, here, ChannelConfig(max_items=2))
    channel.put("a")
    channel.put("b")
    started, used = time.monotonic(), time.process_time()
    with pytest.raises(Full, match="2 of 2 item") as caught:
        channel.put("c", timeout=2 * BRIEF_S)
    assert caught.value.accepted == 0
    assert time.monotonic() - started < 2 * BRIEF_S + 1.0
    assert time.process_time() - used < BRIEF_S, "it spins"
    assert channel.get() == "a"
    channel.put("c")
    assert channel.get_batch(max_items=2) == ["b", "c"]


def test_q6_get_batch_is_a_list(channel: Channel, other: Channel) -> None:
    channel.put("a")
    assert type(other.get_batch(max_items=1)) is list


def test_q9_who_waits_is_told_what_for(channel: Channel, other: Channel) -> None:
    channel.put("x", key="uid-1")
    with pytest.raises(Timeout, match=r"1 item\(s\) queued") as caught:
        other.get(timeout=BRIEF_S, key="uid-2")
    assert caught.value.channel in str(caught.value)
    assert other.get(key="uid-1") == "x"


def test_q10_an_unusable_item_is_dropped_and_counted(channel: Channel, other: Channel) -> None:
    channel.put_many([{"reward": 1.0}, {"status": "?"}, {"reward": 2.0}])
    channel.close()
    total = 0.0
    for row in other:
        if "reward" not in row:
            other.reject()
            continue
        total += row["reward"]
    state = channel.statistics()
    assert (total, state.rejected_items, state.acknowledged_items) == (3.0, 1, 2)


class Poison:
    """Cannot be decoded anywhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("1 / 0",)


def test_q10_an_item_that_cannot_be_decoded_is_told_once(channel: Channel, other: Channel) -> None:
    channel.put_many([Poison(), "good"])
    with pytest.raises(CodecError):
        other.get()
    assert other.get() == "good"
    assert channel.statistics().rejected_items == 1


def test_q11_nothing_is_evicted(name: str, here: Endpoint, there: Endpoint) -> None:
    channel = Channel.create(name, here, ChannelConfig(buffer_size=3 * 5000))
    other = channel.ref.open(there)
    handles = [channel.put_async(bytes([n]) * 5000) for n in range(6)]
    eventually(lambda: channel.statistics().waiting_producers)
    assert channel.statistics().held_bytes <= 3 * 5000
    assert [other.get()[0] for _ in range(6)] == list(range(6))
    assert [handle.result() for handle in handles] == [None] * 6


def test_an_item_larger_than_the_channel_is_refused_at_once(name: str, here: Endpoint) -> None:
    channel = Channel.create(name, here, ChannelConfig(buffer_size="1kB"))
    with pytest.raises(ItemTooLarge, match="raise buffer_size"):
        channel.put(bytes(2000))


def test_put_many_says_how_many_are_in(name: str, here: Endpoint) -> None:
    channel = Channel.create(name, here, ChannelConfig(max_items=3))
    with pytest.raises(Full) as caught:
        channel.put_many(range(5), timeout=BRIEF_S)
    assert caught.value.accepted == 3
    assert [channel.get() for _ in range(3)] == [0, 1, 2]


def test_a_timed_out_get_takes_nothing(channel: Channel, other: Channel) -> None:
    with pytest.raises(Timeout):
        other.get(timeout=BRIEF_S)
    with pytest.raises(Timeout):
        other.get_batch(max_items=2, timeout=BRIEF_S)
    channel.put("a")
    channel.flush()
    assert channel.qsize() == 1
    assert channel.statistics().waiting_consumers == 0


def test_a_cancelled_get_takes_nothing(channel: Channel, other: Channel) -> None:
    handle = other.get_async()
    eventually(lambda: channel.statistics().waiting_consumers)
    assert handle.cancel()
    with pytest.raises(Cancelled):
        handle.result()
    channel.put("a")
    channel.flush()
    eventually(lambda: channel.qsize() == 1)


def test_a_late_reply_to_a_cancelled_get_goes_back(channel: Channel, other: Channel) -> None:
    for _ in range(30):
        handle = other.get_async()
        channel.put("a")
        if not handle.cancel():
            assert handle.result() == "a"
            other.ack()
        else:
            assert channel.get() == "a"
            channel.ack()
    state = channel.statistics()
    assert (state.acknowledged_items, state.depth, state.leased_items) == (30, 0, 0)


def test_handles_can_be_awaited(channel: Channel, other: Channel) -> None:
    async def both() -> object:
        asked = other.get_async()
        await channel.put_async("a")
        return await asked

    assert asyncio.run(both()) == "a"


def test_get_async_waits_by_its_own(channel: Channel, other: Channel) -> None:
    handles = [other.get_async() for _ in range(3)]
    channel.put_many("abc")
    assert [handle.result() for handle in handles] == ["a", "b", "c"]


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
        tags = [tag for tag in lease._tags if tag is not None]
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


def test_close_brings_the_tail_then_the_end(channel: Channel, other: Channel) -> None:
    channel.put_many("abc")
    channel.close()
    channel.close()
    assert list(other) == ["a", "b", "c"]
    with pytest.raises(ChannelClosed, match="closed to producers"):
        channel.put("d")
        channel.flush()


def test_a_put_that_meets_a_closed_channel_is_told(channel: Channel, other: Channel) -> None:
    other.close()
    with pytest.raises(ChannelClosed) as caught:
        channel.put_async("x").result()
    assert caught.value.operation == "put"
    with pytest.raises(ChannelClosed):
        channel.put("y")


def test_create_twice_connects_or_differs(name: str, here: Endpoint, there: Endpoint) -> None:
    Channel.create(name, here, ChannelConfig(max_items=5))
    Channel.create(name, there, ChannelConfig(max_items=5)).put("a")
    with pytest.raises(ConfigMismatch, match="max_items: 6 here, 5 there"):
        Channel.create(name, there, ChannelConfig(max_items=6))


def test_connect_to_nothing_names_what_there_is(channel: Channel, here: Endpoint) -> None:
    with pytest.raises(ChannelUnknown, match=r"Channel\.create") as caught:
        Channel.connect("nowhere", here)
    assert channel.ref.name in caught.value.known


def test_an_unknown_policy_is_refused_at_create(name: str, here: Endpoint) -> None:
    with pytest.raises(PolicyUnknown, match="did you mean 'adaptive'"):
        Channel.create(name, here, ChannelConfig(type="adaptiv"))


def test_no_server_is_said_in_time(name: str, rig: Rig) -> None:
    with (
        rig.endpoint("hasty/0", connection_timeout_s=0.5) as hasty,
        pytest.raises(ServerLost, match="there/7"),
    ):
        Channel.connect(name, hasty, server="there/7")


def test_a_ref_travels_and_a_channel_does_not(channel: Channel) -> None:
    assert pickle.loads(pickle.dumps(channel.ref)) == ChannelRef(channel.ref.name, "channel/0")
    with pytest.raises(TypeError, match=r"send channel\.ref instead"):
        pickle.dumps(channel)


def test_delete_forgets_what_is_closed_and_drained(channel: Channel, other: Channel) -> None:
    channel.put("a")
    with pytest.raises(ChannelBusy, match="still open"):
        channel.delete()
    channel.close()
    with pytest.raises(ChannelBusy, match="still holds"):
        channel.delete()
    assert list(other) == ["a"]
    channel.delete()
    with pytest.raises(ChannelUnknown):
        channel.qsize()


def test_batches_must_make_sense(channel: Channel) -> None:
    with pytest.raises(InvalidConfig, match="max_items"):
        channel.get_batch(max_items=0)
    with pytest.raises(InvalidConfig, match="target_weight"):
        channel.get_batch(target_weight=-1.0)


def test_each_put_can_be_made_to_wait(name: str, here: Endpoint) -> None:
    channel = Channel.create(name, here, ChannelConfig(put_window_items=0))
    channel.put("a")
    assert channel.qsize() == 1, "without a flush"


def test_errors_travel_by_pickle() -> None:
    for error in (Full("c", "2 of 2", 1), LeaseLost("c", "me", 3), Timeout("c", "get", 1.0, "x")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error)
        assert copy.__dict__ == error.__dict__


def test_a_closed_endpoint_says_so(rig: Rig, channel: Channel) -> None:
    with rig.endpoint("brief/0") as brief:
        mine = channel.ref.open(brief)
    with pytest.raises(EndpointClosed):
        mine.qsize()


def test_a_closed_server_answers_who_waits(rig: Rig, name: str, here: Endpoint) -> None:
    with rig.endpoint("channel/9") as endpoint:
        server = ChannelServer(endpoint)
        channel = Channel.create(name, here, server="channel/9")
        waiting = channel.get_async()
        eventually(lambda: server.statistics().channels[0].waiting_consumers)
        server.close()
        with pytest.raises(ServerLost, match="channel/9"):
            waiting.result()
        with pytest.raises(ServerLost):
            channel.qsize()


def test_the_server_describes_itself(server: ChannelServer, channel: Channel) -> None:
    channel.put("a")
    channel.flush()
    names = {state.name: state for state in server.statistics().channels}
    assert names[channel.ref.name].depth == 1


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

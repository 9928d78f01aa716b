"""Channels between endpoints of one process: what the door promises."""

import asyncio
import math
import pickle
import threading
import time

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


@pytest.mark.parametrize("short", [{"weights": [1.0]}, {"keys": ["a"]}])
def test_put_many_wants_a_weight_and_a_key_for_each(channel: Channel, short: dict) -> None:
    with pytest.raises(ValueError, match="fewer"):
        channel.put_many([b"a", b"b"], **short)
    assert channel.qsize() == 0


def test_put_many_with_keys_comes_by_key(channel: Channel, other: Channel) -> None:
    channel.put_many([b"1", b"2", b"3", b"4"], keys=["a", "a", "b", None])
    channel.flush()
    assert other.get(key="b") == b"3"
    assert [other.get(key="a"), other.get(), other.get()] == [b"1", b"2", b"4"]


def test_batches_that_come_ahead_are_in_order_and_go_back(channel: Channel, other: Channel) -> None:
    count, size = 20_000, 50
    channel.put_many([b"%5d" % n for n in range(count)])
    channel.flush()
    got = [item for _ in range(count // size // 2) for item in other.get_batch(max_items=size)]
    assert got == [b"%5d" % n for n in range(count // 2)]
    other.ack()
    channel.close()
    rest = list(channel)  # what had come ahead over there is given to who waits for it
    channel.ack()
    assert sorted(rest) == [b"%5d" % n for n in range(count // 2, count)]
    state = channel.statistics()
    assert (state.acknowledged_items, state.redelivered_items) == (count, 0)

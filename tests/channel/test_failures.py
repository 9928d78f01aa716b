"""Each guarantee with something killed or stopped: real processes over shm and tcp."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from rlinf.channel import Channel, ChannelConfig, ChannelServer, ServerLost
from rlinf.channel.testing import Rig, host
from rlinf.comm import Endpoint
from rlinf.comm.testing import eventually

LARGE = 1 << 16  # floats: 512 kB, so that it travels in shared memory where there is any


@pytest.fixture(scope="module", params=["shm", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        yield rig


@pytest.fixture
def test(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("test/0") as endpoint:
        yield endpoint


def item(number: int) -> np.ndarray:
    return np.full(LARGE, number)


def number_of(array: np.ndarray) -> int:
    assert array.shape == (LARGE,) and array.min() == array.max(), "the item is damaged"
    return int(array[0])


def holder(endpoint: Endpoint, name: str, count: int) -> None:
    """Lease some items, say so, and go to sleep on them."""
    with Channel.connect(name, endpoint).lease_batch(max_items=count) as lease:
        assert [number_of(array) for array in lease] == list(range(count))
        endpoint.send("holding", "test/0")
        signal.pause()


def producer(endpoint: Endpoint, name: str, count: int) -> None:
    """Put some items, have them acknowledged, say so, and go to sleep."""
    channel = Channel.connect(name, endpoint)
    for number in range(count):
        channel.put(item(number))
    channel.flush()
    endpoint.send("acknowledged", "test/0")
    signal.pause()


def worker(endpoint: Endpoint, name: str) -> None:
    """Commit every item of one channel to another until there are no more, a few at a time."""
    source, target = Channel.connect(name, endpoint), Channel.connect(f"{name}-out", endpoint)
    while True:
        with source.lease_batch(max_items=3, timeout=None) as lease:
            outputs = [(number + 1000, 1.0) for number in lease]
            lease.commit(outputs, target, timeout=None)


def test_q7_a_consumer_killed_with_a_lease_loses_nothing(rig: Rig, test: Endpoint, name: str):
    channel = Channel.create(name, test)
    for number in range(6):
        channel.put(item(number))
    with rig.process("holder/0", holder, name, 4) as process:
        assert test.recv() == "holding"
        assert channel.statistics().leased_items == 4
        process.kill()
        eventually(lambda: channel.statistics().leased_items == 0)
        assert [number_of(channel.get()) for _ in range(6)] == list(range(6))
    assert channel.statistics().redelivered_items == 4


def test_a_stopped_consumer_loses_its_lease_and_may_come_back(rig: Rig, test: Endpoint, name: str):
    channel = Channel.create(name, test, ChannelConfig(lease_s=1.0))
    channel.put(item(0))
    with rig.process("holder/0", holder, name, 1) as process:
        assert test.recv() == "holding"
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert number_of(channel.get()) == 0
        assert time.monotonic() - started < 5.0
        os.kill(process.pid, signal.SIGCONT)


def test_what_a_dead_producer_put_is_delivered(rig: Rig, test: Endpoint, name: str):
    channel = Channel.create(name, test)
    with rig.process("producer/0", producer, name, 5) as process:
        assert test.recv() == "acknowledged"
        process.kill()
        channel.close()
        assert [number_of(array) for array in channel] == list(range(5))


def test_a_lone_put_leaves_at_once(rig: Rig, test: Endpoint, name: str):
    def put_and_die(endpoint: Endpoint, name: str) -> None:
        Channel.connect(name, endpoint).put("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    channel = Channel.create(name, test)
    with rig.process("producer/0", put_and_die, name):
        assert channel.get() == "last words"


def test_a_program_that_ends_leaves_nothing_behind(rig: Rig, test: Endpoint, name: str):
    def put_and_end(endpoint: Endpoint, name: str, count: int) -> None:
        channel = Channel.connect(name, endpoint)
        for number in range(count):
            channel.put(number)

    channel = Channel.create(name, test)
    with rig.process("producer/0", put_and_end, name, 2000) as process:
        assert process.join() == 0
        channel.close()
        assert list(channel) == list(range(2000))


def test_commits_are_atomic_under_kills(rig: Rig, test: Endpoint, name: str):
    source, target = Channel.create(name, test), Channel.create(f"{name}-out", test)
    source.put_many(range(300))
    source.close()
    for generation in range(4):
        with rig.process("worker/0", worker, name) as process:
            goal = 30 * (generation + 1)
            eventually(lambda goal=goal: target.statistics().put_items >= goal)
            process.kill()
        eventually(lambda: source.statistics().leased_items == 0)
        state, out = source.statistics(), target.statistics()
        assert out.put_items == state.acknowledged_items, "one without the other"
    with rig.process("worker/0", worker, name):
        eventually(lambda: source.statistics().acknowledged_items == 300)
    target.close()
    assert Counter(target) == Counter(range(1000, 1300))


def test_q13_producers_and_consumers_come_and_go(rig: Rig, test: Endpoint, name: str):
    def produce(endpoint: Endpoint, name: str, first: int, count: int) -> None:
        channel = Channel.connect(name, endpoint)
        for number in range(first, first + count):
            channel.put(number, weight=1.0 + number % 3)
        channel.flush()

    source, target = Channel.create(name, test), Channel.create(f"{name}-out", test)
    with (
        rig.process("producer/0", produce, name, 0, 200),
        rig.process("worker/0", worker, name) as early,
    ):
        eventually(lambda: target.statistics().put_items)
        with (
            rig.process("producer/1", produce, name, 200, 200) as second,
            rig.process("worker/1", worker, name),
        ):
            eventually(lambda: len(source.statistics().consumers) == 2)
            early.kill()
            assert second.join() == 0
            eventually(lambda: source.statistics().put_items == 400)
            source.close()
            eventually(lambda: source.statistics().acknowledged_items == 400)
    target.close()
    assert Counter(target) == Counter(range(1000, 1400))


def test_a_dead_server_is_named(rig: Rig, test: Endpoint, name: str):
    config = ChannelConfig(max_items=1, reconnect_s=0.5)
    with rig.process("channel/7", host) as process:
        assert test.recv() == "serving"
        channel = Channel.create(name, test, config, server="channel/7")
        consumer = channel.ref.open(test)
        channel.put("fits")
        channel.flush()
        caught: list[BaseException] = []

        def wait_for_room() -> None:
            try:
                channel.put("does not fit")
            except ServerLost as error:
                caught.append(error)

        thread = threading.Thread(target=wait_for_room)
        thread.start()
        eventually(lambda: consumer.statistics().waiting_producers)
        process.kill()
        thread.join(10.0)
        assert not thread.is_alive(), "the producer hangs"
    assert isinstance(caught[0], ServerLost) and caught[0].server == "channel/7"
    started = time.monotonic()
    with pytest.raises(ServerLost, match="channel/7 cannot be reached"):
        channel.put("again")
    with pytest.raises(ServerLost, match="channel/7"):
        consumer.get()
    assert time.monotonic() - started < 1.0, "the loss is known"

"""A server that dies and is started again under its name: with a spool nothing is lost, without
one the loss is counted. Real processes, killed by SIGKILL.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from rlinf.channel import (
    Channel,
    ChannelConfig,
    ChannelError,
    DeviceLock,
    ItemsLost,
    LeaseLost,
    ServerLost,
    SpoolConfig,
)
from rlinf.channel.testing import Rig, host
from rlinf.comm import Endpoint
from rlinf.comm.testing import PeerProcess, eventually

LARGE = 1 << 16  # floats: 512 kB, so that it travels in shared memory where there is any
PATIENCE_S = 120.0
"""For a server to start again, on a machine that is busy."""
CONFIG = ChannelConfig(lease_s=2.0)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        yield rig


@pytest.fixture
def test(rig: Rig) -> Iterator[Endpoint]:
    with rig.endpoint("test/0", connection_timeout_s=PATIENCE_S) as endpoint:
        yield endpoint


class Servers:
    """One server after the other under one name."""

    def __init__(self, rig: Rig, test: Endpoint, spool: SpoolConfig | None) -> None:
        self._rig, self._test, self._spool = rig, test, spool
        self._stack = ExitStack()
        self.process: PeerProcess
        self.start()

    def start(self) -> None:
        process = self._rig.process("channel/5", host, CONFIG, self._spool)
        self.process = self._stack.enter_context(process)
        assert self._test.recv(timeout=90.0) == "serving"

    def kill(self) -> None:
        self.process.kill()
        assert self.process.join() == -9, "killed by SIGKILL"

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def spooled(rig: Rig, test: Endpoint, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(rig, test, SpoolConfig(str(tmp_path / "spool")))
    yield servers
    servers.close()


@pytest.fixture
def bare(rig: Rig, test: Endpoint) -> Iterator[Servers]:
    servers = Servers(rig, test, None)
    yield servers
    servers.close()


def open_channel(test: Endpoint, **config: object) -> Channel:
    settings = {"lease_s": 2.0, "reconnect_s": PATIENCE_S} | config
    return Channel.create("q", test, ChannelConfig(**settings), server="channel/5")


def test_accepted_items_survive_with_a_spool(spooled: Servers, test: Endpoint) -> None:
    channel = open_channel(test)
    consumer = channel.ref.open(test)
    assert channel.durability == "process"
    for number in range(20):
        channel.put(number, weight=1.0 + number, key=f"k{number % 2}")
    channel.put(np.arange(LARGE))
    channel.flush()
    assert [consumer.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    consumer.ack()
    spooled.restart()
    channel.put("after")
    channel.close()
    assert [consumer.get(key="k1") for _ in range(3)] == [5, 7, 9]
    rest = list(consumer)
    assert rest[:12] == [6, 8, *range(10, 20)]
    assert np.array_equal(rest[12], np.arange(LARGE)) and rest[13:] == ["after"]
    state = consumer.statistics()
    assert (state.put_items, state.acknowledged_items, state.depth) == (22, 22, 0)


def test_what_was_not_acknowledged_is_sent_again_once(spooled: Servers, test: Endpoint) -> None:
    channel = open_channel(test)
    consumer = channel.ref.open(test)
    spooled.kill()
    handles = [channel.put_async(number) for number in range(100)]
    array = np.zeros(LARGE)
    channel.put(array)
    array[:] = 1.0  # it was taken over: what is sent later is what was put
    assert not any(handle.done() for handle in handles)
    spooled.start()
    for handle in handles:
        handle.result(PATIENCE_S)
    channel.close()
    items = list(consumer)
    assert items[:100] == list(range(100))
    assert not items[100].any()


def test_many_restarts_under_load_lose_and_repeat_nothing(spooled: Servers, test: Endpoint) -> None:
    source = open_channel(test, max_items=50, lease_s=10.0)
    target_config = ChannelConfig(lease_s=10.0, reconnect_s=PATIENCE_S)
    target = Channel.create("out", test, target_config, server="channel/5")
    count = 1500

    def produce() -> None:
        for number in range(count):
            source.put(number, timeout=PATIENCE_S)
        source.close(PATIENCE_S)

    def work() -> None:
        mine = source.ref.open(test)
        done = target.ref.open(test)
        while True:
            try:
                with mine.lease_batch(max_items=7, timeout=PATIENCE_S) as lease:
                    lease.commit([(item, 1.0) for item in lease], done, timeout=PATIENCE_S)
            except LeaseLost:
                continue  # the outputs are dropped, and the items come again
            except ChannelError as error:
                ends.append(error)
                return

    ends: list[BaseException] = []
    threads = [threading.Thread(target=act) for act in (produce, work, work)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = target.statistics().put_items
        eventually(lambda before=before: target.statistics().put_items > before + 50)
        spooled.restart()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [type(end).__name__ for end in ends] == ["ChannelClosed"] * 2, ends
    target.close()
    assert sorted(target) == list(range(count))


def test_a_waiting_get_is_served_by_the_next_server(spooled: Servers, test: Endpoint) -> None:
    channel = open_channel(test, lease_s=10.0)
    got: list[object] = []
    consumer = channel.ref.open(test)
    waiting = threading.Thread(target=lambda: got.append(consumer.get()))
    waiting.start()
    later = channel.ref.open(test).get_async()
    eventually(lambda: channel.statistics().waiting_consumers == 2)
    spooled.restart()
    eventually(lambda: channel.statistics().waiting_consumers == 2)
    channel.put("one")
    channel.put("two")
    waiting.join(PATIENCE_S)
    assert sorted([*got, later.result(PATIENCE_S)]) == ["one", "two"]


def test_a_lease_ends_with_its_server_and_the_item_comes_again(
    spooled: Servers, test: Endpoint
) -> None:
    channel = open_channel(test)
    consumer, results = channel.ref.open(test), Channel.create("r", test, server="channel/5")
    channel.put("work")
    channel.flush()
    with pytest.raises(LeaseLost), consumer.lease_batch(max_items=1) as lease:
        spooled.restart()
        lease.commit([("result", 1.0)], results)
    with consumer.lease() as item:
        assert item == "work"
    assert results.qsize() == 0


def test_an_acknowledgement_after_a_restart_tells_what_it_missed(
    spooled: Servers, test: Endpoint
) -> None:
    channel = open_channel(test)
    consumer = channel.ref.open(test)
    channel.put_many(["first", "second"])
    channel.flush()
    assert [consumer.get(), consumer.get()] == ["first", "second"]
    spooled.restart()
    with pytest.raises(LeaseLost, match="1 item"):  # the second get had acknowledged the first
        consumer.ack()
    assert consumer.get() == "second"
    consumer.ack()
    assert channel.statistics().acknowledged_items == 2


def test_a_commit_on_its_way_when_its_server_dies_is_asked_of_the_next(
    spooled: Servers, test: Endpoint
) -> None:
    channel = open_channel(test)
    consumer, results = channel.ref.open(test), Channel.create("r", test, server="channel/5")
    channel.put_many(["first", "second"])
    channel.flush()
    with pytest.raises(LeaseLost), consumer.lease_batch(max_items=2) as lease:
        commit = lease.commit_later([0], [("result", 1.0)], results, timeout=PATIENCE_S)
        commit.conclude()
        spooled.kill()
        commit = lease.commit_later([1], [("another", 1.0)], results, timeout=PATIENCE_S)
        eventually(commit.done)
        spooled.start()
        commit.conclude()
    assert results.get() == "result"
    assert consumer.get() == "second"
    assert results.qsize() == 0


def test_without_a_spool_the_loss_is_counted_and_work_goes_on(
    bare: Servers, test: Endpoint
) -> None:
    channel = open_channel(test)
    consumer = channel.ref.open(test)
    assert channel.durability == "memory"
    channel.put_many(range(7))
    channel.flush()
    assert consumer.get() == 0
    bare.restart()
    with pytest.raises(ItemsLost, match="7 item") as caught:
        taken_over = False
        channel.put("first")
        taken_over = True  # it is on its way, and only the flush is told
        channel.flush()
    assert (caught.value.lost, caught.value.server) == (7, "channel/5")
    with pytest.raises(ItemsLost):
        consumer.get()
    channel.put("after")
    assert not taken_over or consumer.get() == "first"
    assert consumer.get() == "after"


def test_a_server_that_stays_away_is_given_up(bare: Servers, test: Endpoint) -> None:
    channel = open_channel(test, reconnect_s=0.3)
    consumer = channel.ref.open(test)
    bare.kill()
    with pytest.raises(ServerLost, match="did not come back"):
        consumer.get(timeout=30.0)
    with pytest.raises(ServerLost, match="channel/5"):
        channel.put(1)
        channel.flush()


def test_a_call_whose_time_is_up_says_that_the_server_is_away(
    bare: Servers, test: Endpoint
) -> None:
    channel = open_channel(test)
    bare.kill()
    with pytest.raises(ServerLost, match="has not come back"):
        channel.get(timeout=0.5)


def test_grants_of_the_device_lock_survive_with_a_spool(spooled: Servers, test: Endpoint) -> None:
    first = DeviceLock(test, ["core:0"], server="channel/5")
    second = DeviceLock(test, ["core:0"], server="channel/5")
    order: list[str] = []

    def wait() -> None:
        with second.hold((1, 0), timeout=PATIENCE_S) as grant:
            order.append(f"second {grant.token > held.token}")

    with first.hold((0, 0)) as held:
        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: second.statistics().waiters)
        spooled.restart()
        eventually(lambda: second.statistics().waiters)
        assert [holder.token for holder in second.statistics().holders] == [held.token]
        order.append("first")
    thread.join(PATIENCE_S)
    assert order == ["first", "second True"]

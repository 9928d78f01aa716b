"""An item that no consumer survives: given out so often, then kept aside, and told apart from its
neighbours.
"""

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from rlinf.channel import Channel, ChannelConfig, SpoolConfig
from rlinf.channel.config import ChannelConfig as Config
from rlinf.channel.core import Queue
from rlinf.channel.messages import (
    Accepted,
    Buried,
    ClientId,
    Delivered,
    Gone,
    Outcome,
    Put,
    Released,
    Settle,
    Take,
)
from rlinf.channel.run import Run
from rlinf.channel.simulation.things import things_of
from rlinf.channel.testing import Rig, host
from rlinf.comm import Endpoint
from rlinf.comm.testing import eventually

PRODUCER = ClientId("p/0", 1, 0)


def queue_of(count: int, most: int | None) -> Queue:
    queue = Queue("q", Config(max_deliveries=most))
    run = Run(range(count), 1.0, 1, None, count)
    (accepted,) = queue.step(Put(1, PRODUCER, 0, [run]), 0.0)
    assert isinstance(accepted, Accepted)
    return queue


def deliver_and_die(queue: Queue, life: int, **wish: object) -> tuple[list[object], list[object]]:
    """A consumer takes, and its process ends; what it was given, and what the queue says."""
    consumer = ClientId("c/0", life, 0)
    take = Take(life, consumer, wait=False, **wish)  # type: ignore[arg-type]
    (delivered,) = queue.step(take, 0.0)
    assert isinstance(delivered, Delivered)
    return [item.payload for item in things_of(delivered.runs)], queue.step(Gone("c/0", life), 0.0)


def test_an_item_is_given_out_so_often_and_no_more() -> None:
    queue = queue_of(1, 3)
    for life in (1, 2):
        given, after = deliver_and_die(queue, life)
        assert given == [0] and [type(c) for c in after] == [Released]
    given, after = deliver_and_die(queue, 3)
    assert given == [0] and [type(c) for c in after] == [Released, Buried]
    assert deliver_and_die(queue, 4)[0] == []
    state = queue.statistics(0.0)
    assert (state.dead_items, state.depth, state.held_bytes) == (1, 0, 0)
    assert [item.returns for item in queue.dead] == [3]


def test_neighbours_do_not_share_its_fate() -> None:
    queue = queue_of(8, 4)
    seen: list[list[object]] = []
    for life in range(1, 20):
        given, _ = deliver_and_die(queue, life, max_items=8) if queue.drained is False else ([], [])
        seen.append(given)
        if 0 not in given and given:  # whoever does not meet item 0 works it off
            break
    assert seen[0] == list(range(8)), "all together at first"
    assert [0] in seen, "then alone"
    assert queue.statistics(0.0).dead_items == 1
    assert [item.payload for item in things_of(queue.dead)] == [0]


def test_batches_are_cut_before_it_too() -> None:
    queue = queue_of(4, 4)
    for life in (1, 2):
        assert deliver_and_die(queue, life, max_items=4, full=True)[0] == [0, 1, 2, 3]
    assert deliver_and_die(queue, 3, max_items=4, full=True)[0] == [0]


def test_what_is_only_recalled_or_acknowledged_does_not_count() -> None:
    queue = queue_of(2, 1)
    consumer = ClientId("c/0", 1, 0)
    (delivered,) = queue.step(Take(1, consumer, 2, wait=False), 0.0)
    assert isinstance(delivered, Delivered)
    first = delivered.first_tag
    queue.step(Settle(2, consumer, (first, first), Outcome.DONE), 0.0)
    commands = queue.step(Settle(3, consumer, (first + 1, first + 1), Outcome.RETURNED), 0.0)
    assert [type(command) for command in commands] == [Buried, type(commands[-1])]
    assert queue.statistics(0.0).dead_items == 1


def test_none_means_for_ever() -> None:
    queue = queue_of(1, None)
    for life in range(1, 50):
        assert deliver_and_die(queue, life)[0] == [0]


def test_the_oldest_dead_letters_make_room() -> None:
    queue = queue_of(100, 1)
    for life in range(1, 101):
        deliver_and_die(queue, life)
    assert queue.statistics(0.0).dead_items == 100
    assert [item.payload for item in things_of(queue.dead)] == list(range(36, 100))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("shm") as rig:
        yield rig


def crash_on_poison(endpoint: Endpoint) -> None:
    channel, results = Channel.connect("q", endpoint), Channel.connect("r", endpoint)
    while True:
        with channel.lease_batch(max_items=4, timeout=60.0) as lease:
            if "poison" in list(lease):
                os.kill(os.getpid(), signal.SIGKILL)
            lease.commit([(item, 1.0) for item in lease], results)


def test_an_item_that_kills_every_worker_is_kept_aside_and_named(
    rig: Rig, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "rlinf.channel")
    with rig.server(), rig.endpoint("test/0") as test:
        channel = Channel.create("q", test, ChannelConfig(max_deliveries=2))
        results = Channel.create("r", test)
        channel.put_many(["a", "poison", "b", "c"], keys=["k", "uid-7", "k", "k"])
        channel.close()
        for _ in range(2):
            with rig.process("worker/0", crash_on_poison) as worker:
                assert eventually(lambda: not worker._process.is_alive(), 90.0) is None
                assert worker.join() == -signal.SIGKILL
        with rig.process("worker/0", crash_on_poison):
            eventually(lambda: results.statistics().put_items == 3, 90.0)
        (letter,) = channel.dead_letters()
        assert (letter.item, letter.key, letter.deliveries, letter.order) == (
            "poison",
            "uid-7",
            2,
            1,
        )
        state = channel.statistics()
        assert (state.dead_items, state.acknowledged_items) == (1, 3)
        with pytest.raises(Exception, match="closed and drained"):
            channel.get()
    assert any("'uid-7'" in line and "2 times" in line for line in caplog.messages)


def test_dead_letters_survive_with_a_spool(rig: Rig, tmp_path: object) -> None:
    spool = SpoolConfig(f"{tmp_path}/spool")
    with rig.endpoint("test/0") as test:
        with rig.process("channel/3", host, None, spool) as server:
            assert test.recv(timeout=90.0) == "serving"
            config = ChannelConfig(max_deliveries=1)
            channel = Channel.create("d", test, config, server="channel/3")
            channel.put({"poison": 1})
            with pytest.raises(RuntimeError), channel.lease():
                raise RuntimeError("it fails")
            assert channel.statistics().dead_items == 1
            server.kill()
        with rig.process("channel/3", host, None, spool):
            assert test.recv(timeout=90.0) == "serving"
            assert [letter.item for letter in channel.dead_letters(timeout=60.0)] == [{"poison": 1}]
            channel.close()
            assert list(channel) == []

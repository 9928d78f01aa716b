"""Nothing piles up: descriptors, threads and memory, at workers and at the server."""

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from rlinf.channel import Channel, ChannelConfig
from rlinf.channel.testing import Rig, host
from rlinf.comm import Endpoint
from rlinf.comm.testing import PeerProcess, eventually

ITEMS, WARM_ITEMS, ROUND = 10_000, 2_000, 50
CYCLES, WARM_CYCLES = 200, 30
GROWTH_BYTES = 12 << 20
"""What an allocator may keep; a leak of one item in ten would be more."""


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    nbytes: int


def held(pid: int) -> Held:
    gc.collect()
    process = psutil.Process(pid)
    return Held(process.num_fds(), process.num_threads(), process.memory_info().rss)


@pytest.fixture(params=["shm", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        rig.config = rig.config.with_values({"pool_idle_s": 0.5})  # when unused memory is let go of
        yield rig


@pytest.fixture
def test(rig: Rig) -> Iterator[Endpoint]:
    with rig.endpoint("test/0") as endpoint:
        yield endpoint


@pytest.fixture
def server(rig: Rig, test: Endpoint) -> Iterator[PeerProcess]:
    with rig.process("channel/0", host, ChannelConfig(buffer_size="4MB")) as process:
        assert test.recv() == "serving"
        yield process
        test.send("stop", "channel/0")


def assert_flat(pids: tuple[int, ...], before: list[Held]) -> None:
    """No more of anything; what ends by itself is waited for."""
    for pid, then in zip(pids, before, strict=True):
        eventually(lambda pid=pid, then=then: held(pid).descriptors <= then.descriptors)
        eventually(lambda pid=pid, then=then: held(pid).threads <= then.threads)
        grown = held(pid).nbytes - then.nbytes
        assert grown < GROWTH_BYTES, f"{'worker' if pid == os.getpid() else 'server'}: {grown}"


def test_a_stream_of_items_leaves_nothing(rig: Rig, test: Endpoint, server: PeerProcess) -> None:
    """Small ones, and every eighth in shared memory where there is any: 160 MB in all."""
    pids = os.getpid(), server.pid
    with rig.endpoint("other/0") as other:
        source, sink = Channel.create("stream", test), Channel.connect("stream", other)
        small, large = bytes(1000), np.zeros(1 << 14)

        def stream(count: int) -> None:
            for _ in range(count // ROUND):
                for part in range(ROUND):
                    source.put(small if part % 8 else large)
                for _ in range(ROUND):
                    sink.get()
            source.flush()
            sink.ack()

        stream(WARM_ITEMS)
        before = [held(pid) for pid in pids]
        stream(ITEMS)
        assert_flat(pids, before)
        state = source.statistics()
        assert (state.acknowledged_items, state.held_bytes) == (WARM_ITEMS + ITEMS, 0)


def test_workers_and_channels_that_come_and_go_leave_nothing(
    rig: Rig, test: Endpoint, server: PeerProcess
) -> None:
    pids = os.getpid(), server.pid

    def come_and_go(number: int) -> None:
        name = f"channel-{number}"
        with rig.endpoint("brief/0") as brief:
            mine = Channel.create(name, brief)
            mine.put(np.full(1 << 14, number))
            mine.flush()
            assert Channel.connect(name, test).get()[0] == number
            mine.put(b"last")
            mine.get_async().result()  # or what that consumer, gone already, has given back

    def forget(number: int) -> None:
        channel = Channel.connect(f"channel-{number}", test)
        channel.close()
        for _ in channel:
            pass  # what the two were given and had not acknowledged
        channel.delete()

    def cycles(first: int, last: int) -> None:
        for number in range(first, last):
            come_and_go(number)
            forget(number)

    cycles(0, WARM_CYCLES)
    before = [held(pid) for pid in pids]
    cycles(WARM_CYCLES, WARM_CYCLES + CYCLES)
    assert_flat(pids, before)

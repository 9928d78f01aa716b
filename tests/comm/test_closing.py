"""How endpoints and connections end, and what they leave behind."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlinf.comm import (
    CommConfig,
    Endpoint,
    EndpointClosed,
    Lost,
    MemoryRegistry,
    PeerLost,
)
from rlinf.comm.testing import eventually, worker
from tests.comm.conftest import descriptors_open


def test_what_a_peer_sent_before_it_closed_is_received(config):
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry, config=config) as a:
        with Endpoint("b/0", registry=registry, config=config) as b:
            for number in range(50):
                b.isend((number, np.full(20_000, number)), "a/0")
        for number in range(50):
            got = a.recv("b/0")
            assert got[0] == number
            assert (got[1] == number).all()
        with pytest.raises(PeerLost, match="b/0"):
            a.recv("b/0", timeout=10)


def test_closing_fails_what_is_pending_and_what_comes_after(pair):
    a, _b = pair
    receive, call = a.irecv("b/0"), a.call("x", 1, to="c/0")
    a.close()
    for handle in (receive, call):
        with pytest.raises(EndpointClosed):
            handle.result(0)
    for operation in (
        lambda: a.send(1, "b/0"),
        lambda: a.recv(),
        lambda: a.irecv(),
        lambda: a.call("x", 1, to="b/0"),
        lambda: a.empty(3),
        lambda: a.serve("x", print),
    ):
        with pytest.raises(EndpointClosed, match="a/0"):
            operation()
    a.close()


def test_closing_from_another_thread_wakes_a_receiver(pair):
    a, _ = pair
    threading.Timer(0.05, a.close).start()
    with pytest.raises(EndpointClosed):
        a.recv(timeout=10)


def test_an_idle_connection_is_closed_and_made_again(config):
    registry = MemoryRegistry()
    config = config.with_values({"idle_s": 0.1})
    heard = []
    with (
        Endpoint("a/0", registry=registry, config=config, sink=heard.append) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        waiting = a.irecv("b/0")
        a.send(1, "b/0")
        assert b.recv() == 1
        eventually(lambda: not a.statistics().connections and not b.statistics().connections)
        assert not waiting.done()
        a.send(2, "b/0")
        assert b.recv() == 2
        b.send(3, "a/0")
        assert waiting.result() == 3
    assert not any(isinstance(event, Lost) for event in heard if event.peer == b.id) or b


SHM = CommConfig(backend_priority=("shm",))


TCP = CommConfig(backend_priority=("tcp",))


def test_closing_leaves_no_descriptor_and_no_thread():
    registry = MemoryRegistry()

    def one_round(number):
        transport = ("tcp", "shm", "inproc")[number % 3]
        config = CommConfig(backend_priority=(transport,))
        with (
            Endpoint("a/0", registry=registry, config=config) as a,
            Endpoint("b/0", registry=registry, config=config) as b,
        ):
            a.send(np.ones(10_000), "b/0")
            assert b.recv("a/0").sum() == 10_000

    for number in range(6):
        one_round(number)
    gc.collect()
    descriptors, threads = descriptors_open(), threading.active_count()
    for number in range(30):
        one_round(number)
    gc.collect()
    assert descriptors_open() <= descriptors
    assert threading.active_count() <= threads


def sleeps(endpoint):
    """How often the endpoint's own thread has gone to sleep so far."""
    status = Path(f"/proc/self/task/{endpoint._loop._thread.native_id}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_idle_connected_endpoint_sleeps_and_uses_no_cpu(registry, transport):
    config = CommConfig(backend_priority=(transport,), pool_idle_s=0.02)
    with worker("a/0", registry, config=config) as a, worker("b/0", registry, config=config) as b:
        a.send(np.ones(1 << 20), "b/0")
        assert b.recv("a/0").sum() == 1 << 20
        eventually(lambda: not a._in.transports["shm"].pool.statistics().segments)
        eventually(lambda: not b._in._memory._pool.statistics().segments)
        threading.Event().wait(0.1)  # whoever has just worked lingers for some milliseconds
        before, used = [sleeps(a), sleeps(b)], time.process_time()
        threading.Event().wait(1.0)
        after = [sleeps(a), sleeps(b)]
        assert time.process_time() - used < 0.05
        # Heartbeats, theirs and the registry's answers; nothing else.
        assert max(new - old for new, old in zip(after, before, strict=True)) <= 4


def test_an_endpoint_may_be_closed_by_its_own_handler():
    registry = MemoryRegistry()
    descriptors = descriptors_open()
    with Endpoint("a/0", registry=registry, config=TCP) as a:
        b = Endpoint("b/0", registry=registry, config=TCP)
        closed = threading.Event()
        b.serve("close", lambda request: (b.close(), closed.set()))
        call = a.call("close", None, to="b/0")
        assert closed.wait(10)
        with pytest.raises(PeerLost):
            call.result(10)
        with pytest.raises(EndpointClosed):
            b.recv()
    eventually(lambda: descriptors_open() <= descriptors)

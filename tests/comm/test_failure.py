"""What happens when things go wrong: peers die, strangers call, memory runs out."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from rlinf.comm import (
    AuthenticationError,
    CommConfig,
    Endpoint,
    EndpointClosed,
    Lost,
    MemoryRegistry,
    PeerLost,
    PoolExhausted,
    RegistryServer,
    StaleEpoch,
    Timeout,
    WorkerId,
    plugins,
)
from rlinf.comm.lifecycle import Phase
from rlinf.comm.testing import LossyTransport, PeerProcess, PeerThread, eventually, worker

SHM = CommConfig(backend_priority=("shm",))
TCP = CommConfig(backend_priority=("tcp",))


@pytest.fixture
def registry():
    with RegistryServer() as server:
        yield server


def descriptors_open():
    return len(list(Path("/proc/self/fd").iterdir()))


def silent(endpoint):
    """Connect, serve a call that is never answered, and stay."""
    endpoint.serve("never", lambda request: endpoint.isend("asked", "test/0"))
    endpoint.send("ready", "test/0")
    endpoint.recv("test/0", timeout=60)


def keeper(endpoint, count):
    """Keep what is received; end when told."""
    kept = [endpoint.recv("test/0") for _ in range(count)]
    endpoint.send(len(kept), "test/0")
    endpoint.recv("test/0", tag=1)
    endpoint.send(all((array == number).all() for number, array in enumerate(kept)), "test/0")
    endpoint.recv("test/0", tag=1, timeout=60)


def closes_but_keeps(endpoint, path):
    """Receive, close the endpoint, and look at what was received later."""
    got = endpoint.recv("test/0")
    endpoint.send("have it", "test/0")
    endpoint.recv("test/0", tag=1)
    endpoint.close()
    while not os.path.exists(path):  # noqa: PTH110
        threading.Event().wait(0.01)
    with open(path + ".out", "w") as out:  # noqa: PTH123
        out.write(str((got == 1).all()))


def producer(endpoint):
    """Send one array, then wait to be killed."""
    endpoint.send(np.full(500_000, 5), "test/0")
    endpoint.recv("test/0", timeout=60)


def test_a_killed_peer_ends_receives_calls_and_sends(registry):
    heard = []
    with (
        worker("test/0", registry, SHM) as me,
        PeerProcess("peer/0", registry, silent, config=SHM) as peer,
    ):
        me.add_sink(heard.append)
        assert me.recv("peer/0") == "ready"
        call = me.call("never", 1, to="peer/0")
        assert me.recv("peer/0") == "asked"
        receive, other = me.irecv("peer/0"), me.irecv("other/0")
        began = time.monotonic()
        peer.kill()
        for handle, operation in ((receive, "recv"), (call, "call")):
            with pytest.raises(PeerLost) as caught:
                handle.result(5)
            assert str(caught.value.peer) == "peer/0"
            assert caught.value.operation == operation
        assert time.monotonic() - began < 3.0
        assert not other.done()
        with pytest.raises((PeerLost, Timeout)):
            me.send("anybody?", "peer/0", timeout=3)
        (lost,) = [event for event in heard if isinstance(event, Lost)]
        assert not lost.clean


def test_a_receiver_that_was_never_connected_learns_of_the_death(registry):
    with (
        worker("test/0", registry, TCP) as me,
        PeerProcess("peer/0", registry, _waits, config=TCP) as peer,
    ):
        registry.lookup("peer/0", 20)
        receive = me.irecv("peer/0")
        eventually(lambda: "peer/0" in me.statistics().connections)
        peer.kill()
        with pytest.raises(PeerLost):
            receive.result(5)


def _waits(endpoint):
    endpoint.recv("test/0", timeout=60)


def test_a_peer_that_died_before_it_was_asked_for_is_found_dead(registry):
    with worker("test/0", registry, TCP) as me:
        with PeerProcess("peer/0", registry, _waits, config=TCP) as peer:
            registry.lookup("peer/0", 20)
            peer.kill()
            with pytest.raises(PeerLost, match="peer/0"):
                me.recv("peer/0", timeout=10)


def test_a_stopped_peer_is_not_lost_and_the_deadline_holds(registry):
    with (
        worker("test/0", registry, SHM) as me,
        PeerProcess("peer/0", registry, silent, config=SHM) as peer,
    ):
        me.recv("peer/0")
        os.kill(peer.pid, signal.SIGSTOP)
        with pytest.raises(Timeout):
            me.call("never", 1, to="peer/0", timeout=0.2).result()
        os.kill(peer.pid, signal.SIGCONT)
        assert me.recv("peer/0") == "asked"


def test_a_message_for_an_old_incarnation_does_not_reach_the_new_one(registry):
    with worker("test/0", registry, TCP) as me:
        first = Endpoint("peer/0", registry=registry, config=TCP)
        me.send("hello", "peer/0")
        assert first.recv() == "hello"
        old = me._in.peers.get(first.id).link
        second = Endpoint("peer/0", registry=registry, config=TCP)
        assert second.epoch > first.epoch
        second.send("I am new", "test/0")
        assert me.recv() == "I am new"
        assert me._in.peers.get(second.id).link.epoch == second.epoch
        assert me._in.peers.get(second.id).link is not old
        me.send("for the new", "peer/0")
        assert second.recv() == "for the new"
        eventually(lambda: not first.statistics().connections)
        with pytest.raises(StaleEpoch, match="newer incarnation"):
            first.send("I am old", "test/0", timeout=5)
        first.close()
        me.send("still", "peer/0")
        assert second.recv() == "still"
        second.close()


def test_a_stranger_without_the_token_is_let_at_nothing(registry):
    with worker("test/0", registry, TCP) as me:
        own = MemoryRegistry(token=b"another token")
        own.register(me.record).result()
        with Endpoint("intruder/0", registry=own, config=TCP) as intruder:
            with pytest.raises(AuthenticationError):
                intruder.send("payload", "test/0", timeout=5)
        with pytest.raises(Timeout):
            me.recv(timeout=0.1)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(5000), b"\xff" * 100])
def test_garbage_on_the_port_hurts_nobody(registry, data):
    with worker("test/0", registry, TCP) as me, worker("peer/0", registry, TCP) as peer:
        address = next(a for a in me.record.addresses if a.scheme == "tcp")
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(data)
            stranger.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        peer.send("fine", "test/0")
        assert me.recv() == "fine"


def test_who_connects_and_says_nothing_is_hung_up_on(registry):
    with worker("test/0", registry, TCP.with_values({"connection_timeout_s": 0.3})) as me:
        address = next(a for a in me.record.addresses if a.scheme == "tcp")
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.settimeout(10)
            assert stranger.recv(1) == b""


def test_a_fork_is_told_that_the_endpoint_is_not_its_own():
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry) as a, Endpoint("b/0", registry=registry) as b:
        a.send(1, "b/0")
        read, write = os.pipe()
        child = _fork()
        if child == 0:
            try:
                a.send(2, "b/0")
            except BaseException as error:  # noqa: BLE001 - told to the parent
                os.write(write, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1000).decode().startswith("ForkedProcess: endpoint a/0")
        os.close(read)
        os.close(write)
        a.send(3, "b/0")
        assert [b.recv(), b.recv()] == [1, 3]


def _fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_a_receiver_that_keeps_much_gets_copies_and_the_sender_goes_on(registry):
    config = SHM.with_values({"pool_bytes": 16 << 20})
    count = 40
    with (
        worker("test/0", registry, config) as me,
        PeerProcess("peer/0", registry, keeper, count, config=config),
    ):
        for number in range(count):
            me.send(np.full(1 << 20, number, np.uint8), "peer/0")
        assert me.recv("peer/0") == count
        assert me._in.transports["shm"].pool.statistics().used_bytes <= 10 << 20
        me.send("look", "peer/0", tag=1)
        assert me.recv("peer/0") is True
        me.send("end", "peer/0", tag=1)


def test_a_full_pool_is_an_error_that_says_who_has_it(registry):
    config = SHM.with_values({"pool_bytes": 1 << 20})
    with worker("test/0", registry, config) as me:
        kept = me.empty(700_000, np.uint8)
        to = _connected(me, registry, config)
        with pytest.raises(PoolExhausted, match="pool_bytes=1048576"):
            me.send(np.zeros(2_000_000, np.uint8), to)
        with pytest.raises(PoolExhausted, match="in use"):
            me.send(np.zeros(700_000, np.uint8), to, timeout=0.2)
        assert kept.nbytes == 700_000


_others = []


def _connected(me, registry, config):
    other = Endpoint("other/0", registry=registry, config=config)
    _others.append(other)
    me.send("hello", "other/0")
    assert other.recv() == "hello"
    return "other/0"


@pytest.fixture(autouse=True)
def _close_others():
    yield
    while _others:
        _others.pop().close()


def test_a_send_waits_for_room_in_the_pool_and_goes_on_when_there_is(registry):
    config = SHM.with_values({"pool_bytes": 1 << 20})
    with worker("test/0", registry, config) as me:
        to = _connected(me, registry, config)
        kept = me.empty(700_000, np.uint8)
        waiting = me.isend(np.ones(700_000, np.uint8), to)
        assert not waiting.done()
        del kept
        gc.collect()
        me.send("poke", to, tag=1)
        other = _others[0]
        me._in.transports["shm"].freed()
        assert other.recv("test/0", timeout=5).sum() == 700_000


def test_a_killed_receiver_gives_its_memory_back(registry):
    with (
        worker("test/0", registry, SHM) as me,
        PeerProcess("peer/0", registry, keeper, 5, config=SHM) as peer,
    ):
        for _ in range(5):
            me.send(np.ones(1 << 20, np.uint8), "peer/0")
        assert me.recv("peer/0") == 5
        pool = me._in.transports["shm"].pool
        assert pool.statistics().used_bytes >= 5 << 20
        peer.kill()
        eventually(lambda: pool.statistics().used_bytes == 0)


def test_what_was_received_outlives_its_sender(registry):
    with worker("test/0", registry, SHM) as me:
        with PeerProcess("peer/0", registry, producer, config=SHM) as peer:
            got = me.recv("peer/0")
            peer.kill()
        with pytest.raises(PeerLost):
            me.recv("peer/0", timeout=10)
        assert (got == 5).all()
        got += 1
        with worker("next/0", registry, SHM) as after:
            me.send(got, "next/0")
            assert (after.recv() == 6).all()


def test_what_was_received_outlives_the_endpoint_and_is_not_overwritten(registry, tmp_path):
    path = str(tmp_path / "go")
    config = SHM.with_values({"pool_bytes": 8 << 20})
    with (
        worker("test/0", registry, config) as me,
        PeerProcess("peer/0", registry, closes_but_keeps, path, config=config) as peer,
        worker("next/0", registry, config) as after,
    ):
        me.send(np.ones(1 << 20, np.uint8), "peer/0")
        assert me.recv("peer/0") == "have it"
        me.send("close", "peer/0", tag=1)
        with pytest.raises(PeerLost):
            me.recv("peer/0", timeout=10)
        for _ in range(20):
            me.send(np.zeros(1 << 20, np.uint8), "next/0")
            assert after.recv().sum() == 0
        (tmp_path / "go").write_text("")
        assert peer.join() == 0
        assert (tmp_path / "go.out").read_text() == "True"
        pool = me._in.transports["shm"].pool
        eventually(lambda: pool.statistics().used_bytes == 0)


def test_a_link_that_breaks_loses_a_message_loudly_and_is_made_again():
    plugins.register(LossyTransport)
    try:
        registry = MemoryRegistry()
        config = CommConfig(backend_priority=("lossy",))
        with (
            Endpoint("a/0", registry=registry, config=config) as a,
            Endpoint("b/0", registry=registry, config=config) as b,
        ):
            LossyTransport.left = 3
            a.send(1, "b/0")
            a.send(2, "b/0")
            assert [b.recv("a/0"), b.recv("a/0")] == [1, 2]
            receive = b.irecv("a/0")
            a.send("lost", "b/0")
            with pytest.raises(PeerLost):
                receive.result(5)
            LossyTransport.left = 1
            with pytest.raises(PeerLost):
                a.send(np.ones(1_000_000), "b/0", timeout=5)
            eventually(lambda: a._in.peers.get(b.id).machine.phase is Phase.ABSENT)
            a.send(4, "b/0")
            assert b.recv("a/0") == 4
    finally:
        del plugins.transports()[0]["lossy"]


def test_memory_that_is_changed_while_a_receiver_has_it_is_reported(registry, caplog):
    config = SHM.with_values({"debug_in_place": True})
    with worker("test/0", registry, config) as me, worker("other/0", registry, config) as other:
        data = me.empty(500_000, np.uint8)
        for value in (1, 2):
            data[:] = 0
            me.send(data, "other/0")
            got = other.recv("test/0")
            if value == 2:
                data[50] = value
            del got
            me.send("poke", "other/0")
            other.recv("test/0")
            link = me._in.peers.get(other.id).link
            eventually(lambda link=link: not link.lent_bytes())
        said = "were changed while other/0 still had them"
        eventually(lambda: caplog.text.count(said) == 1)  # another thread writes the log


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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_goes_back_after_a_burst(registry, transport):
    config = CommConfig(backend_priority=(transport,), pool_idle_s=0.02)
    with worker("a/0", registry, config=config) as a, worker("b/0", registry, config=config) as b:
        pools = [a._in.transports["shm"].pool, b._in._memory._pool]
        kept = []
        for number in range(8):
            a.send(np.full(2 << 20, number), "b/0")
            kept.append(b.recv("a/0"))
        assert sum(pool.statistics().used_bytes for pool in pools) >= 8 * (16 << 20)
        assert all(array[-1] == number for number, array in enumerate(kept))
        kept.clear()
        eventually(lambda: not any(pool.statistics().size_bytes for pool in pools))
        a.send(np.ones(2 << 20), "b/0")
        assert b.recv("a/0").sum() == 2 << 20


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


def test_a_thread_peer_runs_the_same_programs(registry):
    with (
        worker("test/0", registry) as me,
        PeerThread("peer/0", registry, silent) as peer,
    ):
        assert me.recv("peer/0") == "ready"
        me.send("end", "peer/0")
        assert peer.join() == 0
    assert WorkerId.parse("test/0") == me.id

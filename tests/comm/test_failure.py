"""What happens when things go wrong: peers die, strangers call, memory runs out."""

import contextlib
import os
import signal
import socket
import time
import warnings

import numpy as np
import pytest

from rlinf.comm import (
    AuthenticationError,
    CommConfig,
    Endpoint,
    Lost,
    MemoryRegistry,
    PeerLost,
    StaleEpoch,
    Timeout,
    WorkerId,
    plugins,
)
from rlinf.comm.lifecycle import Phase
from rlinf.comm.testing import LossyTransport, PeerProcess, PeerThread, eventually, worker

SHM = CommConfig(backend_priority=("shm",))
TCP = CommConfig(backend_priority=("tcp",))


def silent(endpoint):
    """Connect, serve a call that is never answered, and stay."""
    endpoint.serve("never", lambda request: endpoint.isend("asked", "test/0"))
    endpoint.send("ready", "test/0")
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


def test_a_thread_peer_runs_the_same_programs(registry):
    with (
        worker("test/0", registry) as me,
        PeerThread("peer/0", registry, silent) as peer,
    ):
        assert me.recv("peer/0") == "ready"
        me.send("end", "peer/0")
        assert peer.join() == 0
    assert WorkerId.parse("test/0") == me.id

"""Whose memory is whose: what is passed on, kept and given back, and what if there is none."""

import gc
import os
import threading

import numpy as np
import pytest

from rlinf.comm import (
    CommConfig,
    Endpoint,
    MemoryRegistry,
    Parcel,
    PeerLost,
    PoolExhausted,
)
from rlinf.comm.testing import PeerProcess, eventually, worker


def test_a_broadcast_writes_shared_memory_once():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    with Endpoint("a/0", registry=registry, config=config) as a:
        others = [Endpoint(f"b/{n}", registry=registry, config=config) for n in range(3)]
        for other in others:
            a.send("hello", other.id)
        a.broadcast(np.ones(4_000_000, np.uint8), [other.id for other in others])
        assert 4_000_000 <= a._in.transports["shm"].pool.statistics().used_bytes < 5_000_000
        for other in others:
            assert other.recv(source="a/0") == "hello"
            assert other.recv(source="a/0").sum() == 4_000_000
            other.close()


def test_a_parcel_is_passed_on_closed():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    names = ("a/0", "middle/0", "b/0")
    a, middle, b = (Endpoint(name, registry=registry, config=config) for name in names)
    with a, middle, b:
        data = np.arange(200_000)
        a.send(Parcel.pack({"data": data}), "middle/0")
        parcel = middle.recv("a/0")
        assert isinstance(parcel, Parcel)
        middle.send(parcel, "b/0")
        assert middle._in.transports["shm"].pool.statistics().used_bytes == 0
        del parcel
        got = b.recv("middle/0").open()
        np.testing.assert_array_equal(got["data"], data)
        assert a._in.transports["shm"].pool.statistics().used_bytes >= data.nbytes
        del got
        eventually(lambda: a._in.transports["shm"].pool.statistics().used_bytes == 0)


def test_a_changed_array_is_passed_on_as_changed():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    names = ("a/0", "middle/0", "b/0")
    a, middle, b = (Endpoint(name, registry=registry, config=config) for name in names)
    with a, middle, b:
        a.send(np.zeros(100_000), "middle/0")
        got = middle.recv("a/0")
        got[7] = 1
        middle.send(got, "b/0")
        assert b.recv("middle/0")[7] == 1


def test_the_same_memory_sent_twice_arrives_apart():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        data = a.empty((100_000,), np.float64)
        data[:] = 3
        a.send(data, "b/0")
        a.send(data, "b/0")
        a.send(data[10:50_000], "b/0")
        first, second, third = (b.recv("a/0") for _ in range(3))
        first[:] = 0
        assert (second == 3).all()
        second[:] = 1
        assert (third == 3).all()


def test_empty_is_sent_without_a_copy():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        data = a.empty((1000, 1000), np.float32)
        data[:] = 2
        before = a._in.transports["shm"].pool.statistics().used_bytes
        a.send({"w": data}, "b/0")
        assert a._in.transports["shm"].pool.statistics().used_bytes == before
        assert (b.recv("a/0")["w"] == 2).all()


def test_neighbours_in_one_array_are_lent_as_one():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    names = ("a/0", "middle/0", "b/0")
    a, middle, b = (Endpoint(name, registry=registry, config=config) for name in names)
    with a, middle, b:
        pool = a._in.transports["shm"].pool
        size = 1 << 19
        block = memoryview(a.empty(4 * size, np.uint8))
        block[:] = bytes(range(1, 5)) * size
        rows = [block[n * size : (n + 1) * size] for n in (0, 1, 3)]
        header = Parcel.pack(np.zeros(size, np.uint8)).header
        a.send([Parcel(header, (row,)) for row in rows], "middle/0")
        del block, rows
        middle.send(middle.recv("a/0"), "b/0")  # the middle passes them on as they came
        first, second, fourth = (parcel.open() for parcel in b.recv("middle/0"))
        for got in (first, second, fourth):
            assert (got.reshape(-1, 4) == [1, 2, 3, 4]).all()
        first[:] = 9  # to its owner alone
        assert (second.reshape(-1, 4) == [1, 2, 3, 4]).all()
        links = middle._in.transports["shm"]._links.values()
        assert sum(len(link._lender._lent) for link in links) == 2
        del first, got, fourth
        eventually(lambda: sum(len(link._lender._lent) for link in links) == 1)
        assert pool.statistics().used_bytes == 4 * size
        del second
        eventually(lambda: pool.statistics().used_bytes == 0)


def test_empty_of_torch_and_of_nothing(inproc):
    a, b = inproc
    torch = pytest.importorskip("torch")
    data = a.empty((3, 4), torch.bfloat16)
    data.fill_(1.5)
    a.send(data, "b/0")
    assert torch.equal(b.recv("a/0"), data)
    assert a.empty((0, 3), torch.float32).shape == (0, 3)
    assert a.empty((0, 3), np.int8).shape == (0, 3)
    assert a.empty(4).dtype == np.float64


_others = []
SHM = CommConfig(backend_priority=("shm",))


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

"""Long, random, and merciless: run with -m slow."""

import gc
import random
import threading
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlinf.comm import CommConfig, Endpoint, MemoryRegistry, PeerLost, RegistryServer
from rlinf.comm.testing import PeerProcess, eventually, worker

pytestmark = pytest.mark.slow

SIZES = (0, 10, 1000, 5000, 70_000, 300_000, 2_000_000)


def config(transport):
    return CommConfig(backend_priority=(transport,), pool_bytes=256 << 20)


def message(chance, number):
    size = chance.choice(SIZES)
    if size < 100_000:
        data = np.frombuffer(chance.randbytes(size), np.uint8).copy()
    else:
        data = np.full(size, chance.randrange(256), np.uint8)
    return {"number": number, "data": data, "sum": zlib.crc32(data), "text": "x" * size}


def check(got):
    assert zlib.crc32(got["data"]) == got["sum"], f"message {got['number']} is corrupt"


def converse(endpoint, peer, seed, count, tag):
    """Send, receive, keep, change and call, and check everything again and again."""
    chance, kept = random.Random(seed), []
    for number in range(count):
        sent = message(chance, number)
        if chance.random() < 0.5:
            endpoint.send(sent, peer, tag=tag)
        else:
            endpoint.isend(sent, peer, tag=tag)
            sent["data"][:] = 1
        got = endpoint.recv(peer, tag=tag)
        assert got["number"] == number
        check(got)
        dice = chance.random()
        if dice < 0.2 and got["data"].nbytes:
            got["data"] ^= 255
            got["sum"] = zlib.crc32(got["data"])
        if dice < 0.4:
            kept.append(got)
        if dice > 0.95:
            check(endpoint.call("echo", got, to=peer).result())
        if len(kept) > 10:
            check(kept.pop(chance.randrange(10)))
    for got in kept:
        check(got)


def converse_in_threads(endpoint, peer, seed, count, threads):
    failures = []

    def work(tag):
        try:
            converse(endpoint, peer, seed * 100 + tag, count, tag)
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            failures.append(error)

    running = [threading.Thread(target=work, args=(tag,)) for tag in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(100)
    assert failures == []
    assert not any(thread.is_alive() for thread in running)


def partner(endpoint, seed, count, threads):
    endpoint.serve("echo", lambda request: request.reply(request.payload))
    endpoint.send("ready", "test/0", tag=99)
    converse_in_threads(endpoint, "test/0", seed, count, threads)
    endpoint.send("done", "test/0", tag=99)
    endpoint.recv("test/0", tag=99)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_threads_of_two_processes_talk_at_random(transport, seed):
    count, threads = 150, 6
    with (
        RegistryServer() as registry,
        worker("test/0", registry, config(transport)) as me,
        PeerProcess("peer/0", registry, partner, seed, count, threads, config=config(transport)),
    ):
        me.serve("echo", lambda request: request.reply(request.payload))
        assert me.recv("peer/0", tag=99) == "ready"
        converse_in_threads(me, "peer/0", seed + 50, count, threads)
        assert me.recv("peer/0", tag=99) == "done"
        if transport == "shm":
            gc.collect()
            eventually(lambda: me._in.transports["shm"].pool.statistics().used_bytes == 0)
        me.send("end", "peer/0", tag=99)


def chatter(endpoint, seed):
    """Send without end, and receive what comes, until killed."""
    chance = random.Random(seed)
    endpoint.serve("echo", lambda request: request.reply(request.payload))

    def listen():
        while True:
            check(endpoint.recv("test/0", tag=1, timeout=60))

    threading.Thread(target=listen, daemon=True).start()
    number = 0
    while True:
        endpoint.send(message(chance, number), "test/0", timeout=60)
        number += 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_killed_at_any_moment_leaves_no_half_message_and_no_memory(transport):
    chance = random.Random(1)
    with RegistryServer() as registry, worker("test/0", registry, config(transport)) as me:
        open_before = None
        for round_ in range(8):
            kept, number = [], 0
            with PeerProcess("peer/0", registry, chatter, round_, config=config(transport)) as peer:
                killer = threading.Timer(chance.random() * 0.3, peer.kill)
                with pytest.raises(PeerLost):
                    while True:
                        got = me.recv("peer/0", timeout=20)
                        check(got)
                        assert got["number"] == number
                        number += 1
                        if number == 1:
                            killer.start()
                        if chance.random() < 0.1:
                            kept.append(got)
                        me.isend(message(chance, 0), "peer/0", tag=1)
                        if chance.random() < 0.2:
                            me.call("echo", got, to="peer/0")
                killer.join()
            for got in kept:
                check(got)
            del got
            kept.clear()
            gc.collect()
            now = len(list(Path("/proc/self/fd").iterdir()))
            open_before = open_before or now
            assert now <= open_before + 2
        if transport == "shm":
            eventually(lambda: me._in.transports["shm"].pool.statistics().used_bytes == 0)


def held():
    """What this process has: descriptors, threads, children, and megabytes of memory."""
    gc.collect()
    me = psutil.Process()
    return np.array(
        [
            len(list(Path("/proc/self/fd").iterdir())),
            threading.active_count(),
            len(me.children(recursive=True)),
            me.memory_info().rss >> 20,
        ]
    )


SLACK = np.array([2, 0, 0, 40])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_ten_thousand_connections_and_returns_leave_nothing_behind(transport):
    """A guest greets, and says goodbye, or dies: its sockets close without a word."""
    registry = MemoryRegistry()
    setting = config(transport)
    with Endpoint("hub/0", registry=registry, config=setting) as hub:

        def one(number):
            name = f"guest/{number % 7}"
            with Endpoint(name, registry=registry, config=setting) as guest:
                guest.send(np.ones(2000) if number % 10 == 0 else number, "hub/0")
                assert hub.recv_from(name)[1] == guest.id
                if number % 3 == 0:
                    waiting = hub.irecv(name)
                    guest._in.peers.get(hub.id).link.close("killed")
                    with pytest.raises(PeerLost):
                        waiting.result(60)

        for number in range(300):
            one(number)
        before = held()
        for number in range(10_000):
            one(number)
        assert (held() <= before + SLACK).all(), f"{before} before, {held()} after"


def greet(endpoint):
    endpoint.send({"x": np.ones(100_000), "epoch": endpoint.epoch}, "test/0")
    endpoint.recv("test/0", timeout=300)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_forty_processes_are_killed_and_return_and_leave_nothing_behind(transport):
    with RegistryServer() as registry, worker("test/0", registry, config(transport)) as me:
        epoch, before = 0, None
        for number in range(40):
            with PeerProcess("peer/0", registry, greet, config=config(transport)) as peer:
                got = me.recv("peer/0", timeout=120)
                assert got["x"].sum() == 100_000
                assert got["epoch"] > epoch
                epoch = got["epoch"]
                peer.kill()
                with pytest.raises(PeerLost):
                    me.recv("peer/0", timeout=60)
            del got
            if number == 5:
                before = held()
        assert (held() <= before + SLACK).all(), f"{before} before, {held()} after"

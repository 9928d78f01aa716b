"""Many workers: in one process, and as processes that come, die and return."""

import random
from collections import Counter

import pytest

from rlinf.comm import CommConfig, Endpoint, MemoryRegistry, PeerLost, RegistryServer, wait_all
from rlinf.comm.registry import Joined, Left
from rlinf.comm.testing import PeerProcess, eventually, worker

INPROC = CommConfig(backend_priority=("inproc",))
WORKERS = 1000
PROCESSES = 64


def partners(rank, count):
    """Whom a worker talks to: a few, spread over all."""
    return sorted({(rank * step + 1) % count for step in (1, 7, 31)} - {rank})


def test_a_thousand_workers_register_and_only_those_who_talk_are_connected():
    registry = MemoryRegistry(lease_s=600.0)  # on a slow machine they all take long to come
    heard = []
    stop = registry.watch(lambda change: heard.append(type(change)))
    everybody = [
        Endpoint(f"crowd/{rank}", registry=registry, config=INPROC) for rank in range(WORKERS)
    ]
    try:
        assert not any(one.statistics().connections for one in everybody)
        few = range(0, WORKERS, 10)
        for rank in few:
            for other in partners(rank, WORKERS):
                everybody[rank].isend(rank, f"crowd/{other}")
        expected = {rank: set() for rank in range(WORKERS)}
        for rank in few:
            for other in partners(rank, WORKERS):
                assert everybody[other].recv(f"crowd/{rank}") == rank
                expected[rank].add(f"crowd/{other}")
                expected[other].add(f"crowd/{rank}")
        for rank, one in enumerate(everybody):
            assert set(one.statistics().connections) == expected[rank]
    finally:
        for one in everybody:
            one.close()
        stop()
    assert Counter(heard) == {Joined: WORKERS, Left: WORKERS}


def resident(endpoint, count):
    """Greet the partners, answer everybody, until told to end."""
    endpoint.serve("hello", lambda request: request.reply([endpoint.id.rank, request.payload]))
    endpoint.send(endpoint.epoch, "test/0")
    while endpoint.recv("test/0", timeout=300) != "end":
        mine = partners(endpoint.id.rank, count)
        calls = [endpoint.call("hello", other, to=f"town/{other}") for other in mine]
        answers = wait_all(calls, timeout=120)
        assert answers == [[other, other] for other in mine]
        endpoint.send(len(answers), "test/0", tag=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_four_processes_talk_die_return_and_outlive_their_registry():
    chance = random.Random(3)
    registry = RegistryServer(lease_s=120.0)
    address, token, port = registry.address, registry.token, int(registry.address.split(":")[-1])
    town = {}

    def start(rank):
        name, config = f"town/{rank}", CommConfig(heartbeat_s=0.5)
        town[rank] = PeerProcess(name, registry, resident, PROCESSES, config=config)
        town[rank].__enter__()

    with worker("test/0", registry) as me:
        try:
            for rank in range(PROCESSES):
                start(rank)
            epochs = {rank: me.recv(f"town/{rank}", timeout=300) for rank in town}

            def everybody_talks():
                for rank in town:
                    me.send("talk", f"town/{rank}")
                for rank in town:
                    assert me.recv(f"town/{rank}", tag=1, timeout=300) == len(
                        partners(rank, PROCESSES)
                    )

            everybody_talks()
            dead = chance.sample(range(PROCESSES), 8)
            for rank in dead:
                town[rank].kill()
            for rank in dead:
                with pytest.raises(PeerLost):
                    me.recv(f"town/{rank}", timeout=60)
                town[rank].__exit__(None, None, None)
                start(rank)
            for rank in dead:
                assert me.recv(f"town/{rank}", timeout=300) > epochs[rank]
            everybody_talks()
            registry.close()
            registry = RegistryServer(port=port, token=token, lease_s=120.0)
            assert registry.address == address
            eventually(lambda: len(registry.members()) == PROCESSES + 2, 60)
            everybody_talks()
        finally:
            for rank in town:
                me.isend("end", f"town/{rank}")
            for one in town.values():
                one.__exit__(None, None, None)
            registry.close()

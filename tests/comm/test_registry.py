import threading
from dataclasses import replace

import pytest

from rlinf.comm import (
    Address,
    ConfigError,
    Device,
    Endpoint,
    MemoryRegistry,
    RegistryClient,
    RegistryServer,
    StaleEpoch,
    Timeout,
    UnknownWorker,
    WorkerId,
    WorkerRecord,
)
from rlinf.comm.config import CommConfig
from rlinf.comm.inspection import CONNECTIONS
from rlinf.comm.registry import Joined, Left
from rlinf.comm.registry_server import from_plain, to_plain
from rlinf.comm.testing import FakeClock, eventually, worker

A, B = WorkerId("a", 0), WorkerId("b", 0)


def record(id, epoch=1, **values):
    return WorkerRecord(id, epoch, (Address.parse("tcp://127.0.0.1:4000"),), "host", 7, **values)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def registry(clock):
    return MemoryRegistry(lease_s=15, clock=clock)


def test_who_registers_is_found(registry):
    entered = registry.register(record(A)).result()
    assert registry.lookup("a/0") == entered
    assert registry.members() == (entered,)
    assert registry.members("b") == ()


def test_registering_again_gives_a_higher_epoch_and_the_old_one_is_stale(registry):
    first = registry.register(record(A, 5)).result()
    second = registry.register(record(A, 5)).result()
    assert second.epoch > first.epoch
    with pytest.raises(StaleEpoch, match="replaced"):
        registry.renew(first).result()
    registry.unregister(A, first.epoch).result()
    assert registry.lookup(A) == second


def test_a_lease_that_is_not_renewed_runs_out(registry, clock):
    registry.register(record(A)).result()
    kept = registry.register(record(B)).result()
    clock.advance(10)
    registry.renew(kept).result()
    clock.advance(10)
    assert registry.members() == (kept,)


def test_epochs_go_on_after_a_lease_has_run_out(registry, clock):
    first = registry.register(record(A)).result()
    clock.advance(100)
    assert registry.register(record(A)).result().epoch > first.epoch


def test_a_heartbeat_refills_a_registry_that_was_restarted(clock):
    old, new = MemoryRegistry(clock=clock), MemoryRegistry(clock=clock)
    entered = old.register(record(A, metadata={"role": "x"})).result()
    new.renew(entered).result()
    assert new.lookup(A) == entered


def test_a_lookup_waits_until_the_worker_registers(registry):
    found = registry.find(A, 10)
    assert not found.done()
    entered = registry.register(record(A)).result()
    assert found.result() == entered


def test_a_lookup_that_waits_in_vain_names_the_nearest(registry):
    registry.register(record(WorkerId("rollout", 1))).result()
    with pytest.raises(UnknownWorker, match="rollout/1"):
        registry.lookup("rolout/1", timeout=0.01)
    with pytest.raises(LookupError):
        registry.lookup("x/0", timeout=0.0)


def test_watchers_hear_who_comes_and_goes(registry, clock):
    heard = []
    stop = registry.watch(heard.append)
    entered = registry.register(record(A)).result()
    registry.unregister(A, entered.epoch).result()
    again = registry.register(record(A)).result()
    clock.advance(60)
    registry.expire()
    assert heard == [Joined(entered), Left(entered, False), Joined(again), Left(again, True)]
    stop()
    registry.register(record(A)).result()
    assert len(heard) == 4


def test_records_survive_being_made_plain():
    original = record(A, 3, device=Device("cuda", 1, "GPU-1"), metadata={"k": "v"})
    assert from_plain(to_plain(original)) == original


def test_a_client_finds_workers_of_other_clients():
    with RegistryServer() as server, worker("a/0", server) as a, worker("b/0", server) as b:
        a.send("hello", "b/0")
        assert b.recv_from() == ("hello", A)
        assert {str(r.id) for r in server.members()} == {"a/0", "b/0", "registry/0"}


def test_a_registry_on_this_host_is_not_called_far():
    with RegistryServer(host="127.0.0.1") as server, worker("a/0", server) as a:
        views = a.call(CONNECTIONS, None, to="a/0").result()
        [why] = [view["because"] for view in views if view["peer"] == "registry/0"]
    assert "both are on one host" in why


def test_a_server_is_a_registry_in_its_own_process():
    with RegistryServer() as server, Endpoint("a/0", registry=server) as a, worker("b/0", server):
        a.send(1, "b/0")


def test_workers_start_in_any_order():
    with RegistryServer() as server, worker("a/0", server) as a:
        waiting = a.isend("early", "b/0")
        assert not waiting.done()
        with worker("b/0", server) as b:
            assert b.recv("a/0") == "early"
            waiting.wait()


def test_an_unknown_worker_is_an_error_at_the_deadline():
    with (
        RegistryServer() as server,
        worker("trainer/0", server) as a,
        pytest.raises((UnknownWorker, Timeout), match="traner/0"),
    ):
        a.send(1, "traner/0", timeout=0.2)


def test_a_server_that_is_restarted_knows_everybody_after_the_next_heartbeat():
    config = CommConfig(heartbeat_s=0.1)
    with RegistryServer() as server:
        address, token, port = server.address, server.token, int(server.address.rsplit(":", 1)[1])
        client = RegistryClient(address, token)
        a = Endpoint("a/0", registry=client, config=config)
        b = Endpoint("b/0", registry=client, config=config)
    with a, b:
        looking = a.isend("through the gap", "b/0", timeout=20)
        with RegistryServer(port=port, token=token) as again:
            assert again.address == address
            eventually(lambda: len(again.members()) == 3)
            looking.wait(20)
            assert b.recv("a/0") == "through the gap"


def test_a_wrong_token_is_refused():
    from rlinf.comm import AuthenticationError

    with RegistryServer() as server, pytest.raises(AuthenticationError):
        Endpoint("a/0", registry=RegistryClient(server.address, b"wrong"))


def test_a_registry_that_is_not_there_is_an_error_that_says_where():
    config = CommConfig(connection_timeout_s=0.3)
    with RegistryServer() as server:
        address = server.address
    with pytest.raises((Timeout, ConnectionError), match="registry"):
        Endpoint("a/0", registry=RegistryClient(address, b"x"), config=config)


def test_a_client_watches():
    heard = []
    with RegistryServer() as server, worker("a/0", server) as a:
        stop = RegistryClient(server.address, server.token).bind(a._in.caller).watch(heard.append)
        eventually(lambda: any(c.record.id == A for c in heard))
        with worker("b/0", server):
            eventually(lambda: any(isinstance(c, Joined) and c.record.id == B for c in heard))
        eventually(lambda: any(isinstance(c, Left) and c.record.id == B for c in heard))
        stop()


def test_a_client_without_an_endpoint_says_what_to_do():
    with pytest.raises(ConfigError, match="Endpoint"):
        RegistryClient("tcp://127.0.0.1:1", "00").members()
    with pytest.raises(ConfigError, match="hexadecimal"):
        RegistryClient("tcp://127.0.0.1:1", "not hex")


def test_a_worker_behind_the_clock_of_its_predecessor_still_gets_in(registry):
    future = registry.register(record(A, 10**19)).result()
    with Endpoint("a/0", registry=registry) as a:
        assert a.epoch > future.epoch
        assert a.record == replace(a.record, epoch=a.epoch)


def test_thirty_two_endpoints_that_listen_at_once_get_addresses_of_their_own():
    registry = MemoryRegistry()
    made = []

    def make(number):
        made.append(Endpoint(f"w/{number}", registry=registry))

    threads = [threading.Thread(target=make, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    addresses = [str(address) for endpoint in made for address in endpoint.record.addresses]
    for endpoint in made:
        endpoint.close()
    assert len(made) == 32
    assert len(set(addresses)) == len(addresses)

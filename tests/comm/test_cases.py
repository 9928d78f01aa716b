"""Inputs that broke other people's programs and are not at home in another file."""

import socket
import threading

import numpy as np
import pytest

from rlinf.comm import CodecError, CommConfig, Endpoint, MemoryRegistry, RegistryServer, wait_all
from rlinf.comm.testing import worker
from rlinf.comm.transports.tcp import host_towards


@pytest.fixture(params=["inproc", "shm", "tcp"])
def pair(request):
    registry = MemoryRegistry()
    config = CommConfig(backend_priority=(request.param,))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        yield a, b


class Unspeakable:
    def __reduce__(self):
        raise RuntimeError("not to be pickled")


def test_after_an_operation_that_fails_at_once_the_next_ones_run(pair):
    a, b = pair
    for operation in (a.isend, a.send):
        with pytest.raises(CodecError, match=r"\$\.x"):
            operation({"x": Unspeakable()}, "b/0")
    handles = [a.isend(number, "b/0") for number in range(10)]
    wait_all(handles, timeout=10)
    assert [b.recv("a/0") for _ in range(10)] == list(range(10))


def test_a_failing_handler_and_a_failing_sink_stop_nothing(pair, caplog):
    a, b = pair

    def fails(_):
        raise RuntimeError("on purpose")

    b.add_sink(fails)
    b.serve("fails", fails)
    for number in range(3):
        with pytest.raises(Exception, match="on purpose"):
            a.call("fails", number, to="b/0").result(10)
        a.send(number, "b/0")
        assert b.recv("a/0") == number


def test_a_send_among_many_that_are_under_way_keeps_the_order(pair):
    a, b = pair
    sizes = [0, 3_000_000, 10, 100_000, 1]
    got = []

    def receive():
        for _ in range(50):
            number, data = b.recv("a/0")
            assert (data == number).all()
            got.append(number)

    receiver = threading.Thread(target=receive)
    receiver.start()
    handles = []
    for number in range(50):
        data = np.full(sizes[number % len(sizes)], number, np.int32)
        if number % 7 == 3:
            a.send([number, data], "b/0")
        else:
            handles.append(a.isend([number, data], "b/0"))
            data[:] = -1
    wait_all(handles, timeout=20)
    receiver.join(20)
    assert got == list(range(50))


def test_an_address_is_told_that_answers_whatever_the_hosts_own_name_is():
    with RegistryServer() as registry, worker("a/0", registry) as a:
        told = {address.host for address in a.record.addresses if address.scheme == "tcp"}
        assert told == {host_towards(registry.host)} == {"127.0.0.1"}
        for address in a.record.addresses:
            if address.scheme == "tcp":
                socket.create_connection((address.host, address.port), 10).close()


@pytest.mark.slow
def test_a_thousand_and_twenty_four_listeners_have_a_port_each():
    """The system chooses the port of a socket that is bound to it: nobody probes and lets go."""
    registry = MemoryRegistry()
    config = CommConfig(backend_priority=("tcp",))
    ports = []

    def listen():
        held = [
            Endpoint(f"{threading.get_ident()}/{n}", registry=registry, config=config)
            for n in range(32)
        ]
        ports.extend(a.port for one in held for a in one.record.addresses if a.scheme == "tcp")
        gate.wait(60)
        for one in held:
            one.close()

    gate = threading.Barrier(32)
    threads = [threading.Thread(target=listen) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(set(ports)) == len(ports) == 32 * 32

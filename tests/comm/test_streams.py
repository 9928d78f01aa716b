"""Large buffers over several TCP connections."""

import socket
import threading

import numpy as np
import pytest

from rlinf.comm import CommConfig, Endpoint, MemoryRegistry, PeerLost
from rlinf.comm.errors import ConfigError
from rlinf.comm.testing import TransportTests, eventually
from rlinf.comm.transports.streams import StreamsCarrier, StreamsTransport, _number

CONFIG = CommConfig(backend_priority=("streams",), tcp_streams=3, chunk_bytes=1 << 13)
LARGE = np.arange(1 << 20, dtype=np.int32)


class TestStreams(TransportTests):
    transport = "streams"
    config = CONFIG


@pytest.fixture
def pair():
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=CONFIG) as a,
        Endpoint("b/0", registry=registry, config=CONFIG) as b,
    ):
        yield a, b


def carrier_to(endpoint, name):
    """The sending end of what goes to a peer."""
    return endpoint._peer(name).link._outward._carrier


def test_order_is_kept_and_other_tags_pass(pair):
    a, b = pair
    sent = [LARGE, 1, LARGE + 1, "two", 3]
    handles = [a.isend(one, "b/0") for one in sent]
    a.send("another tag", "b/0", tag=1)
    assert b.recv("a/0", tag=1) == "another tag"
    for one in sent:
        assert np.array_equal(b.recv("a/0"), one)
    for handle in handles:
        handle.result(5.0)
    assert a.statistics().connections == {"b/0": "streams"}


def test_both_directions_at_once(pair):
    a, b = pair

    def talk(one, other):
        for number in range(5):
            one.isend(LARGE + number, other)
        for number in range(5):
            assert one.recv(other)[-1] == LARGE[-1] + number

    threads = [threading.Thread(target=talk, args=args) for args in ((a, "b/0"), (b, "a/0"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("nbytes", [1 << 15, (1 << 15) + 1, (1 << 17) - 1, 3 << 16, (3 << 16) + 5])
def test_sizes_that_do_not_divide(pair, nbytes):
    a, b = pair
    data = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    a.send(data, "b/0")
    assert np.array_equal(b.recv("a/0"), data)


def test_a_stream_that_breaks_is_the_loss_of_the_peer_and_the_next_send_connects_anew(pair):
    a, b = pair
    a.send(LARGE, "b/0")
    assert b.recv("a/0")[-1] == LARGE[-1]
    broken = a._peer("b/0").link
    carrier_to(a, "b/0")._sockets[1].shutdown(socket.SHUT_RDWR)
    a.isend(LARGE, "b/0")
    with pytest.raises(PeerLost, match="a/0"):
        b.recv("a/0", timeout=10.0)
    eventually(lambda: a._peer("b/0").link is not broken)
    a.send(LARGE + 5, "b/0")
    assert b.recv("a/0")[0] == 5, "half a message is never delivered"


def test_a_stream_that_stands_still_is_an_error():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        carrier = StreamsCarrier([here], lambda nbytes: memoryview(bytearray(nbytes)), 0.05)
        with pytest.raises(TimeoutError, match="1 of 1 streams do not move"):
            carrier.receive(10, b"")


def test_a_stranger_is_not_let_in():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"x" * 16 + b"\0")
        assert _number(here, b"y" * 16) is None
        there.sendall(b"y" * 16 + b"\2")
        assert _number(here, b"y" * 16) == 2
        there.close()
        assert _number(here, b"y" * 16) is None


def test_it_is_there_only_where_there_are_to_be_several():
    device = None
    assert StreamsTransport.unsuited(device, CommConfig()) == "tcp_streams is 1"
    assert StreamsTransport.unsuited(device, CommConfig(tcp_streams=2)) is None
    secret = CommConfig(tcp_streams=2, tls_cert="c", tls_key="k", tls_ca="a")
    assert "encrypt" in StreamsTransport.unsuited(device, secret)
    for wrong in (0, 65):
        with pytest.raises(ConfigError, match="1 to 64"):
            CommConfig(tcp_streams=wrong)

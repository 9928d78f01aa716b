"""Many small messages at a time: the same as one by one, for whoever receives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.comm import ANY, CodecError, CommConfig, Endpoint, MemoryRegistry, Timeout
from rlinf.comm.bundle import tie, untie
from rlinf.comm.errors import ProtocolError


@pytest.fixture(params=["inproc", "shm", "tcp"])
def pair(request):
    registry = MemoryRegistry()
    config = CommConfig(backend_priority=(request.param,))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        yield a, b


def mixed(count):
    kinds = (
        lambda n: b"%d" % n,
        lambda n: {"n": n},
        lambda n: b"x" * 5000 + b"%d" % n,
        lambda n: b"",
        lambda n: "text" * (n % 7),
        lambda n: np.full(3000, n).tolist(),
    )
    return [kinds[n % len(kinds)](n) for n in range(count)]


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=40))
def test_what_is_tied_is_untied(messages):
    assert untie(tie(messages)) == messages


@given(st.binary(max_size=200))
def test_bytes_that_are_no_bundle_are_an_error(data):
    try:
        messages = untie(data)
    except ProtocolError:
        return
    assert tie(messages) == data


def test_a_bundle_that_claims_more_than_there_is_allocates_nothing():
    for data in (b"\xff\xff\xff\xff" + bytes(100), b"\1\0\0\0\xff\xff\xff\xff", b"\0\0\0\0"):
        with pytest.raises(ProtocolError):
            untie(data)


def test_each_is_received_on_its_own_and_in_order(pair):
    a, b = pair
    messages = mixed(700)
    a.many.send(messages, "b/0")
    assert [b.recv("a/0") for _ in messages] == messages


def test_many_are_received_at_a_time_however_they_were_sent(pair):
    a, b = pair
    messages = mixed(300)
    for message in messages[:50]:
        a.send(message, "b/0")
    a.many.send(iter(messages[50:]), "b/0")
    got = []
    while len(got) < len(messages):
        some = b.many.recv(most=7)
        assert 1 <= len(some) <= 7
        got += some
    assert got == messages
    assert b.statistics().received == a.statistics().sent == len(messages)


def test_receives_that_wait_take_from_a_bundle_and_leave_the_rest(pair):
    a, b = pair
    waiting = [b.irecv("a/0"), b.irecv(ANY), b.irecv("a/0")]
    waiting[1].cancel()
    a.many.send([b"1", b"2", b"3", b"4", b"5"], "b/0")
    assert [waiting[0].result(), waiting[2].result()] == [b"1", b"2"]
    assert b.recv() == b"3"
    assert b.many.recv("a/0") == [b"4", b"5"]
    with pytest.raises(Timeout):
        b.many.recv("a/0", timeout=0.01)


def test_tags_are_apart(pair):
    a, b = pair
    a.many.send([b"1", b"2"], "b/0", tag=1)
    a.many.send([b"3"], "b/0", tag=2)
    assert b.many.recv(tag=2) == [b"3"]
    assert b.many.recv(tag=1, most=1) == [b"1"]
    assert b.many.recv(tag=1) == [b"2"]


def test_the_window_holds_for_many_and_is_given_back_whole():
    registry = MemoryRegistry()
    config = CommConfig(backend_priority=("tcp",), window_bytes=1 << 16)
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        with pytest.raises(Timeout, match="has not received yet"):
            a.many.send([b"x" * 100] * 2000, "b/0", timeout=0.2)
        left = a.statistics().sent
        for _ in range(20):
            while left:
                left -= len(b.many.recv("a/0", most=5))
            a.many.send([b"y" * 50] * 300, "b/0")
            left = 300
        while left:
            left -= len(b.many.recv("a/0"))
        peer = a._peer("b/0")
        b.send(b"with it goes the credit", "a/0")
        assert a.recv("b/0")
        assert peer.window.outstanding() == 0


def test_an_error_of_one_message_is_told_after_those_before_it(pair):
    a, b = pair
    a.many.send([1, ValueError("needs a pickle"), 2], "b/0")
    b._exchange._allow_pickle = False
    assert b.many.recv("a/0") == [1]
    with pytest.raises(CodecError):
        b.many.recv("a/0")
    assert b.many.recv("a/0") == [2]

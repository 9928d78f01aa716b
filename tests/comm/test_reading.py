"""A thread that receives reads the connection itself: nobody else misses anything by that."""

import threading
import time

import numpy as np
import pytest

from rlinf.comm import CodecError, CommConfig, Endpoint, MemoryRegistry, Timeout
from rlinf.comm.frame import BARE, NUMBER, TEXT
from rlinf.comm.testing import eventually


@pytest.fixture(params=["tcp", "shm"])
def pair(request):
    registry, config = MemoryRegistry(), CommConfig(backend_priority=(request.param,))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        a.send("hello", "b/0")
        b.recv("a/0")
        yield a, b


def read_by_itself(endpoint, peer):
    """Whether the connection is out of the poller."""
    return not endpoint._peer(peer).link._watched


def talk(a, b):
    """Both sides read their connection themselves."""
    for number in range(5):
        a.send(number, "b/0")
        assert b.recv("a/0") == number
        b.send(number, "a/0")
        assert a.recv("b/0") == number
    assert read_by_itself(a, "b/0")


def test_a_call_that_comes_while_a_thread_waits_for_a_message_is_answered(pair):
    a, b = pair
    b.serve("double", lambda request: request.reply(2 * request.payload))
    talk(a, b)
    got = []
    waiter = threading.Thread(target=lambda: got.append(b.recv("a/0", timeout=10.0)))
    waiter.start()
    assert [a.call("double", n, to="b/0").result(5.0) for n in range(3)] == [0, 2, 4]
    a.send("at last", "b/0")
    waiter.join(5.0)
    assert got == ["at last"]


def test_a_call_that_comes_when_nobody_receives_any_more_is_answered(pair):
    a, b = pair
    b.serve("double", lambda request: request.reply(2 * request.payload))
    talk(a, b)
    assert a.call("double", 4, to="b/0").result(5.0) == 8
    eventually(lambda: not read_by_itself(b, "a/0"))


def test_messages_of_other_tags_are_kept_in_order(pair):
    a, b = pair
    talk(a, b)
    for number in range(50):
        a.send(number, "b/0", tag=number % 3)
    a.send("end", "b/0", tag=3)
    assert b.recv("a/0", tag=3) == "end"
    for tag in (2, 0, 1):
        expected = list(range(tag, 50, 3))
        assert [b.recv("a/0", tag=tag) for _ in expected] == expected


def test_a_receive_asked_for_earlier_goes_first(pair):
    a, b = pair
    talk(a, b)
    earlier = b.irecv("a/0")
    a.send(1, "b/0")
    a.send(2, "b/0")
    assert b.recv("a/0") == 2
    assert earlier.result(5.0) == 1


def test_threads_that_receive_from_one_peer_get_all_in_order(pair):
    a, b = pair
    count = 400
    got = {tag: [] for tag in range(3)}

    def receive(tag):
        for _ in range(count):
            got[tag].append(b.recv("a/0", tag=tag, timeout=20.0))

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in got]
    for thread in threads:
        thread.start()
    for number in range(count):
        for tag in got:
            a.send(number if number % 50 else np.full(50_000, number), "b/0", tag=tag)
    for thread in threads:
        thread.join(30.0)
    for numbers in got.values():
        assert [int(np.max(number)) for number in numbers] == list(range(count))


def test_a_deadline_holds(pair):
    a, b = pair
    talk(a, b)
    for limit in (0.0, 0.01, 0.1):
        begun = time.monotonic()
        with pytest.raises(Timeout):
            b.recv("a/0", timeout=limit)
        assert limit <= time.monotonic() - begun < limit + 2.0


def test_every_message_is_counted_once(pair):
    a, b = pair
    before = b.statistics()
    talk(a, b)
    a.many.send([b"x" * 10] * 100, "b/0")
    assert b.recv("a/0") == b"x" * 10
    assert len(b.many.recv("a/0")) == 99
    after = b.statistics()
    assert after.received - before.received == 105
    assert after.received_bytes - before.received_bytes >= 1000
    assert a.statistics().sent == after.received


def test_a_sink_that_comes_later_hears_of_all_that_comes_later(pair):
    a, b = pair
    talk(a, b)
    heard = []
    b.add_sink(lambda event: heard.append(type(event).__name__))
    for number in range(3):
        a.send(number, "b/0")
        assert b.recv("a/0") == number
    assert heard.count("Received") == 3


def test_what_a_receiver_writes_is_gone_from_the_next_message_in_that_place():
    registry, config = MemoryRegistry(), CommConfig(backend_priority=("shm",))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        for number in range(30):
            a.send(np.full(100_000, number), "b/0")
            got = b.recv("a/0")
            assert (got == number).all()
            if number % 3 == 0:
                got[number::1000] = -1
            del got
            b.send(b"done", "a/0")
            assert a.recv("b/0") == b"done"
        assert a._in.transports["shm"].pool.statistics().used_bytes == 0, "leases ride on messages"


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**63,
        True,
        "",
        "plain",
        "n\u00e4her",
        "\ud800",
        "x" * 5000,
        b"",
        b"x" * 5000,
    ],
)
def test_the_simplest_values_arrive_as_what_they_were(pair, value):
    a, b = pair
    a.send(value, "b/0")
    a.many.send([value, value], "b/0")
    got = [b.recv("a/0") for _ in range(3)]
    assert got == [value] * 3
    assert {type(one) for one in got} == {type(value)}


@pytest.mark.parametrize(("flags", "data"), [(TEXT, b"\xff"), (NUMBER, b"123"), (BARE, b"1")])
def test_what_claims_to_be_simple_and_is_not_is_an_error(pair, flags, data):
    a, b = pair
    peer = a._peer("b/0")
    assert a._outbox.try_small(peer, 0, flags, data)
    with pytest.raises(CodecError, match="malformed"):
        b.recv("a/0")
    a.send("and goes on", "b/0")
    assert b.recv("a/0") == "and goes on"

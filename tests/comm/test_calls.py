"""Services: calls, their answers and their errors."""

import threading

import numpy as np
import pytest

from rlinf.comm import (
    CodecError,
    Endpoint,
    MemoryRegistry,
    PeerLost,
    RemoteError,
    ServiceUnknown,
    Timeout,
    wait_all,
)
from rlinf.comm.testing import eventually


def test_calls_and_their_errors(pair):
    a, b = pair
    b.serve("double", lambda request: request.reply(request.payload * 2))
    b.serve("raise", lambda request: {}[request.payload])
    b.serve("ours", lambda request: request.fail(PeerLost("x is gone", peer=a.id, epoch=4)))
    b.serve("unsendable", lambda request: request.reply(threading.Lock()))
    assert a.call("double", np.arange(3), to="b/0").result().tolist() == [0, 2, 4]
    with pytest.raises(RemoteError, match="KeyError: 'nope'") as caught:
        a.call("raise", "nope", to="b/0").result()
    assert "KeyError" in caught.value.traceback
    with pytest.raises(PeerLost, match="x is gone") as ours:
        a.call("ours", None, to="b/0").result()
    assert (ours.value.peer, ours.value.epoch) == (a.id, 4)
    with pytest.raises(ServiceUnknown, match=r"raise, rlinf.connections, rlinf.echo, uns"):
        a.call("dubble", 1, to="b/0").result()
    with pytest.raises(CodecError):
        a.call("unsendable", 1, to="b/0").result()
    assert a.call("double", 4, to="b/0").result() == 8


def test_a_request_may_be_answered_later_from_another_thread_and_only_once(pair):
    a, b = pair
    kept = []
    b.serve("later", kept.append)
    handle = a.call("later", "please", to="b/0")
    eventually(lambda: kept)
    assert (kept[0].payload, kept[0].source, kept[0].epoch) == ("please", a.id, a.epoch)
    thread = threading.Thread(target=kept[0].reply, args=("at last",))
    thread.start()
    assert handle.result() == "at last"
    thread.join()
    with pytest.raises(RuntimeError, match="twice"):
        kept[0].reply("again")


def test_a_call_nobody_answers_ends_at_its_deadline(pair):
    a, b = pair
    b.serve("silent", lambda request: None)
    with pytest.raises(Timeout, match="b/0"):
        a.call("silent", 1, to="b/0", timeout=0.05).result()


def test_calls_keep_their_order(pair):
    a, b = pair
    seen = []
    b.serve("note", lambda request: (seen.append(request.payload), request.reply())[1])
    wait_all([a.call("note", number, to="b/0") for number in range(200)])
    assert seen == list(range(200))


def test_a_chain_of_three_that_wait_in_their_handlers_does_not_hang():
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry) as a,
        Endpoint("b/0", registry=registry) as b,
        Endpoint("c/0", registry=registry) as c,
    ):
        b.serve("next", lambda r: r.reply(b.call("next", r.payload + 1, to="c/0").result(5)))
        c.serve("next", lambda r: r.reply(c.call("last", r.payload + 1, to="a/0").result(5)))
        a.serve("last", lambda r: r.reply(r.payload * 10))
        assert a.call("next", 1, to="b/0").result(10) == 30

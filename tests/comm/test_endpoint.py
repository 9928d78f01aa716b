import asyncio
import signal
import threading
from collections import Counter

import numpy as np
import pytest

from rlinf.comm import (
    ANY,
    ChromeTraceSink,
    CodecError,
    CommConfig,
    CommError,
    Connected,
    Endpoint,
    EndpointClosed,
    Lost,
    MemoryRegistry,
    Parcel,
    PeerLost,
    Received,
    RemoteError,
    Sent,
    ServiceUnknown,
    Timeout,
    WorkerId,
    wait_all,
)
from rlinf.comm.testing import eventually

TRANSPORTS = ["inproc", "tcp", "shm"]


@pytest.fixture(params=TRANSPORTS)
def config(request):
    return CommConfig(backend_priority=(request.param,))


@pytest.fixture
def pair(config):
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        yield a, b


@pytest.fixture
def inproc():
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry) as a, Endpoint("b/0", registry=registry) as b:
        yield a, b


def test_send_and_receive(pair):
    a, b = pair
    a.send({"x": np.arange(5), "y": [1, "two", None]}, "b/0")
    got, source = b.recv_from()
    assert source == WorkerId("a", 0)
    assert got["y"] == [1, "two", None]
    np.testing.assert_array_equal(got["x"], np.arange(5))


def test_tags_are_apart_and_any_takes_the_oldest(pair):
    a, b = pair
    for number in range(3):
        a.send(("one", number), "b/0", tag=1)
        a.send(("two", number), "b/0", tag=2)
    assert b.recv(tag=2) == ("two", 0)
    assert [b.recv("a/0", tag=1)[1] for _ in range(3)] == [0, 1, 2]
    assert [b.recv(ANY, tag=2)[1] for _ in range(2)] == [1, 2]


def test_receives_that_wait_are_served_in_the_order_they_were_asked(pair):
    a, b = pair
    handles = [b.irecv("a/0") for _ in range(5)]
    for number in range(5):
        a.send(number, "b/0")
    assert wait_all(handles) == [0, 1, 2, 3, 4]


def test_a_withdrawn_receive_takes_no_message(pair):
    a, b = pair
    first, second = b.irecv("a/0"), b.irecv("a/0")
    first.cancel()
    a.send("for the second", "b/0")
    assert second.result() == "for the second"
    with pytest.raises(Timeout):
        b.recv("a/0", timeout=0.02)
    a.send("kept", "b/0")
    assert b.recv("a/0") == "kept"


def test_an_interrupted_receive_loses_no_message(pair):
    a, b = pair
    a.send(0, "b/0")
    assert b.recv("a/0") == 0
    me = threading.get_ident()
    interrupt = threading.Timer(0.1, signal.pthread_kill, (me, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        b.recv("a/0")
    interrupt.join()
    a.send(1, "b/0")
    eventually(lambda: b.statistics().waiting_bytes)
    assert b.recv("a/0") == 1


def test_a_worker_sends_to_itself(pair):
    a, _ = pair
    a.send(np.arange(3), "a/0", tag=4)
    assert a.recv("a/0", tag=4).tolist() == [0, 1, 2]
    a.serve("me", lambda request: request.reply(request.payload * 2))
    assert a.call("me", 21, to="a/0").result() == 42


def test_broadcast_reaches_all(config):
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry, config=config) as a:
        others = [Endpoint(f"b/{n}", registry=registry, config=config) for n in range(3)]
        data = np.arange(1_000_000)
        a.broadcast(data, [other.id for other in others], tag=3)
        data[:] = 0
        for other in others:
            got = other.recv("a/0", tag=3)
            assert got[-1] == 999_999
            got[:] = 5
        for other in others:
            other.close()


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


def test_three_that_connect_in_opposite_orders_do_not_hang(config):
    registry = MemoryRegistry()
    names = ["x/0", "y/0", "z/0"]
    ends = [Endpoint(name, registry=registry, config=config) for name in names]
    start = threading.Barrier(3)

    def talk(mine, order):
        start.wait()
        handles = [mine.isend((str(mine.id), other), other) for other in order]
        heard.append(sorted(mine.recv()[0] for _ in order))
        wait_all(handles)

    heard = []
    orders = [["y/0", "z/0"], ["z/0", "x/0"], ["x/0", "y/0"]]
    threads = [
        threading.Thread(target=talk, args=(end, order))
        for end, order in zip(ends, orders, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for end in ends:
        end.close()
    assert sorted(heard) == [["x/0", "y/0"], ["x/0", "z/0"], ["y/0", "z/0"]]


def test_a_sender_that_is_never_heard_is_stopped_by_the_window():
    registry = MemoryRegistry()
    config = CommConfig(window_bytes=1 << 20, backend_priority=("tcp",))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        sent = 0
        with pytest.raises(Timeout, match="window_bytes"):
            for _ in range(100):
                a.send(np.zeros(100_000, np.uint8), "b/0", timeout=0.2)
                sent += 1
        assert 8 <= sent <= 11
        for _ in range(sent):
            b.recv("a/0")
        a.send("goes on", "b/0")
        assert b.recv("a/0") == "goes on"
        a.send(np.zeros(5_000_000, np.uint8), "b/0")
        assert b.recv("a/0").nbytes == 5_000_000


def test_much_more_than_a_window_goes_back_and_forth(config):
    registry, config = MemoryRegistry(), config.with_values({"window_bytes": 1 << 20})
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        data = [np.ones(100_000, np.uint8), b"small"]
        for _ in range(60):
            a.send(data, "b/0", timeout=5)
            b.send(b.recv("a/0"), "a/0", timeout=5)
            a.recv("b/0")


def test_ten_thousand_small_messages_beside_a_large_one_lose_nothing(config):
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        got = []

        def receive():
            got.extend(b.recv("a/0") for _ in range(10_000))

        thread = threading.Thread(target=receive)
        thread.start()
        handle = a.isend(np.ones(1_000_000, np.uint8), "b/0", tag=1)
        for number in range(10_000):
            a.send((number, b"x" * 90), "b/0")
        thread.join(60)
        assert [number for number, _ in got] == list(range(10_000))
        assert b.recv("a/0", tag=1).sum() == 1_000_000
        handle.wait()


def test_many_threads_share_an_endpoint(pair):
    a, b = pair
    b.serve("echo", lambda request: request.reply(request.payload))
    failures = []

    def work(tag):
        try:
            for step in range(40):
                obj = np.full(step * 300, tag) if step % 4 == 0 else (tag, step)
                a.send(obj, "b/0", tag=tag)
                back = b.recv("a/0", tag=tag)
                assert back == obj if isinstance(obj, tuple) else (back == tag).all()
                assert a.call("echo", (tag, step), to="b/0").result() == (tag, step)
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_asyncio_awaits_sends_receives_and_calls(pair):
    a, b = pair
    b.serve("inc", lambda request: request.reply(request.payload + 1))

    async def ping():
        for number in range(20):
            receive = b.irecv("a/0")
            await a.isend(number, "b/0")
            assert await receive == number
        return await asyncio.gather(*[a.call("inc", n, to="b/0") for n in range(50)])

    assert asyncio.run(ping()) == list(range(1, 51))


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


def test_pickle_can_be_refused():
    registry, config = MemoryRegistry(), CommConfig(allow_pickle=False)
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry) as b,
    ):
        with pytest.raises(CodecError, match="pickl"):
            a.send(lambda: 1, "b/0")
        b.send(lambda: 1, "a/0")
        with pytest.raises(CodecError, match="pickl"):
            a.recv("b/0")
        b.send("fine", "a/0")
        assert a.recv("b/0") == "fine"


def test_sinks_hear_of_everything(config):
    registry, heard = MemoryRegistry(), []
    trace = ChromeTraceSink("a/0")
    with Endpoint("a/0", registry=registry, config=config, sink=heard.append) as a:
        a.add_sink(trace)
        a.add_sink(lambda event: 1 / 0)
        with Endpoint("b/0", registry=registry, config=config) as b:
            a.send("x", "b/0")
            b.recv("a/0")
            b.send("y", "a/0")
            a.recv("b/0")
        eventually(lambda: any(isinstance(event, Lost) for event in heard))
    kinds = Counter(type(event) for event in heard)
    assert kinds[Sent] == kinds[Received] == kinds[Connected] == kinds[Lost] == 1
    lost = next(event for event in heard if isinstance(event, Lost))
    assert lost.clean
    assert str(lost.peer) == "b/0"


def test_a_trace_is_a_file_that_a_browser_opens(inproc, tmp_path):
    import json

    a, _b = inproc
    trace = ChromeTraceSink("a/0")
    a.add_sink(trace)
    a.send("x", "b/0")
    trace.write(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(row["name"] == "send message to b/0" for row in rows)


def test_statistics(pair):
    a, b = pair
    a.send(b"x" * 1000, "b/0")
    eventually(lambda: b.statistics().received == 1)
    assert a.statistics().sent == 1
    assert b.statistics().waiting_bytes >= 1000
    assert list(a.statistics().connections) == ["b/0"]
    b.recv()
    assert b.statistics().waiting_bytes == 0


def test_what_a_peer_sent_before_it_closed_is_received(config):
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry, config=config) as a:
        with Endpoint("b/0", registry=registry, config=config) as b:
            for number in range(50):
                b.isend((number, np.full(20_000, number)), "a/0")
        for number in range(50):
            got = a.recv("b/0")
            assert got[0] == number
            assert (got[1] == number).all()
        with pytest.raises(PeerLost, match="b/0"):
            a.recv("b/0", timeout=10)


def test_closing_fails_what_is_pending_and_what_comes_after(pair):
    a, _b = pair
    receive, call = a.irecv("b/0"), a.call("x", 1, to="c/0")
    a.close()
    for handle in (receive, call):
        with pytest.raises(EndpointClosed):
            handle.result(0)
    for operation in (
        lambda: a.send(1, "b/0"),
        lambda: a.recv(),
        lambda: a.irecv(),
        lambda: a.call("x", 1, to="b/0"),
        lambda: a.empty(3),
        lambda: a.serve("x", print),
    ):
        with pytest.raises(EndpointClosed, match="a/0"):
            operation()
    a.close()


def test_closing_from_another_thread_wakes_a_receiver(pair):
    a, _ = pair
    threading.Timer(0.05, a.close).start()
    with pytest.raises(EndpointClosed):
        a.recv(timeout=10)


def test_an_idle_connection_is_closed_and_made_again(config):
    registry = MemoryRegistry()
    config = config.with_values({"idle_s": 0.1})
    heard = []
    with (
        Endpoint("a/0", registry=registry, config=config, sink=heard.append) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        waiting = a.irecv("b/0")
        a.send(1, "b/0")
        assert b.recv() == 1
        eventually(lambda: not a.statistics().connections and not b.statistics().connections)
        assert not waiting.done()
        a.send(2, "b/0")
        assert b.recv() == 2
        b.send(3, "a/0")
        assert waiting.result() == 3
    assert not any(isinstance(event, Lost) for event in heard if event.peer == b.id) or b


def test_a_name_that_is_no_name_is_an_error(inproc):
    a, _ = inproc
    with pytest.raises(ValueError, match="group/rank"):
        a.send(1, "nobody")
    with pytest.raises(CommError):
        a.send(1, "nobody/7", timeout=0.01)

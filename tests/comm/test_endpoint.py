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
    Lost,
    MemoryRegistry,
    Received,
    Sent,
    Timeout,
    WorkerId,
    wait_all,
)
from rlinf.comm.testing import eventually


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


def test_a_name_that_is_no_name_is_an_error(inproc):
    a, _ = inproc
    with pytest.raises(ValueError, match="group/rank"):
        a.send(1, "nobody")
    with pytest.raises(CommError):
        a.send(1, "nobody/7", timeout=0.01)

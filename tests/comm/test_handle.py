import asyncio
import threading
import time

import pytest

from rlinf.comm import Cancelled, Handle, PeerLost, Timeout, wait_all
from rlinf.comm.progress import Loop


@pytest.fixture
def loop():
    loop = Loop("test")
    yield loop
    loop.close()


def test_result_and_error():
    good, bad = Handle("good"), Handle("bad")
    assert not good.done()
    assert good.set_result(3)
    assert good.result() == 3
    assert good.exception() is None
    bad.set_error(KeyError("x"))
    with pytest.raises(KeyError):
        bad.result()
    bad.wait()


def test_the_first_completion_wins():
    handle = Handle()
    assert handle.set_result(1)
    assert not handle.set_result(2)
    assert not handle.set_error(ValueError())
    assert not handle.cancel()
    assert handle.result() == 1


def test_cancel_completes_with_an_error_that_names_the_operation():
    handle = Handle("recv from rollout/3")
    assert handle.cancel()
    with pytest.raises(Cancelled, match="rollout/3"):
        handle.result()


def test_a_wait_that_runs_out_leaves_the_handle_pending():
    handle = Handle("slow thing")
    with pytest.raises(Timeout, match="slow thing"):
        handle.wait(0.01)
    with pytest.raises(TimeoutError):
        handle.result(0.0)
    assert not handle.done()
    handle.set_result(None)
    handle.wait(0.0)


def test_waiting_for_ever_says_so(caplog):
    handle = Handle("something")
    threading.Timer(0.02, handle.set_result, (1,)).start()
    with caplog.at_level("INFO"):
        assert handle.result(None) == 1
    assert "without a deadline" in caplog.text


def test_callbacks_run_once_in_order_also_when_late():
    handle = Handle()
    seen = []
    handle.add_done_callback(lambda h: seen.append(("first", h.result())))
    handle.add_done_callback(lambda h: seen.append(("second", h.result())))
    handle.set_result(5)
    handle.add_done_callback(lambda h: seen.append(("late", h.result())))
    assert seen == [("first", 5), ("second", 5), ("late", 5)]


def test_a_callback_that_raises_does_not_stop_the_others(caplog):
    handle = Handle("thing")
    seen = []
    handle.add_done_callback(lambda h: 1 / 0)
    handle.add_done_callback(seen.append)
    handle.set_result(None)
    assert seen == [handle]
    assert "ZeroDivisionError" in caplog.text


def test_many_threads_wait_for_one_handle():
    handle = Handle()
    got = []
    threads = [threading.Thread(target=lambda: got.append(handle.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    handle.set_result("x")
    for thread in threads:
        thread.join()
    assert got == ["x"] * 8


def test_await_on_a_loop_that_another_thread_completes():
    async def main():
        handle = Handle("awaited")
        threading.Timer(0.02, handle.set_result, (7,)).start()
        return await handle

    assert asyncio.run(main()) == 7


def test_await_raises_and_gather_collects():
    async def main():
        handles = [Handle() for _ in range(3)]
        for number, handle in enumerate(handles):
            threading.Timer(0.01, handle.set_result, (number,)).start()
        assert await asyncio.gather(*handles) == [0, 1, 2]
        bad = Handle()
        threading.Timer(0.01, bad.set_error, (PeerLost("gone"),)).start()
        with pytest.raises(PeerLost):
            await bad

    asyncio.run(main())


def test_a_loop_that_has_ended_is_not_disturbed():
    handle = Handle()

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(handle), 0.01)

    async def _await(handle):
        return await handle

    asyncio.run(main())
    assert handle.set_result(1)


def test_wait_all_keeps_order():
    handles = [Handle() for _ in range(3)]
    for number, handle in enumerate(reversed(handles)):
        handle.set_result(number)
    assert wait_all(handles) == [2, 1, 0]


def test_wait_all_names_the_handle_that_failed_and_leaves_the_others_alone():
    handles = [Handle("a"), Handle("b"), Handle("c")]
    handles[0].set_result(1)
    handles[1].set_error(PeerLost("gone"))
    with pytest.raises(PeerLost) as caught:
        wait_all(handles, timeout=1)
    assert "handle 1 of 3: b" in caught.value.__notes__[-1]
    assert not handles[2].done()


def test_wait_all_has_one_deadline_for_all():
    began = time.monotonic()
    with pytest.raises(Timeout):
        wait_all([Handle() for _ in range(10)], timeout=0.05)
    assert time.monotonic() - began < 1.0


def test_a_loop_runs_what_is_posted_and_timed(loop):
    handle = Handle("posted", progress=loop)
    loop.post(lambda: handle.set_result("x"))
    assert handle.result() == "x"
    later = Handle("later", progress=loop)
    loop.call_later(0.02, lambda: later.set_result(loop.is_dispatching()))
    assert later.result() is True


def test_nobody_has_to_wait_for_timers_to_run(loop):
    ran = threading.Event()
    loop.call_later(0.01, ran.set)
    assert ran.wait(10)
    again = threading.Event()
    loop.post(again.set)
    assert again.wait(10)


def test_a_cancelled_timer_does_not_run(loop):
    seen = []
    timer = loop.call_later(0.01, lambda: seen.append("cancelled"))
    timer.cancel()
    done = Handle(progress=loop)
    loop.call_later(0.05, lambda: done.set_result(None))
    done.wait()
    assert seen == []


def test_an_expiring_handle_fails_by_itself(loop):
    handle = Handle("expiring", progress=loop)
    loop.expire(time.monotonic() + 0.02, handle, lambda: Timeout("too late"))
    with pytest.raises(Timeout, match="too late"):
        handle.result(10)


def test_many_threads_share_one_loop(loop):
    def work(number):
        for step in range(50):
            handle = Handle(f"{number}.{step}", progress=loop)
            loop.call_later(0.0005 * (step % 3), lambda h=handle, s=step: h.set_result(s))
            assert handle.result(10) == step

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_callback_on_the_loop_may_wait_itself(loop):
    outer = Handle("outer", progress=loop)

    def nested():
        inner = Handle("inner", progress=loop)
        loop.call_later(0.01, lambda: inner.set_result(1))
        outer.set_result(inner.result(5) + 1)

    loop.post(nested)
    assert outer.result(10) == 2


def test_an_idle_loop_uses_no_cpu(loop):
    loop.post(lambda: None)
    settled = Handle(progress=loop)
    loop.call_later(0.05, lambda: settled.set_result(None))
    settled.wait()
    before = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.05

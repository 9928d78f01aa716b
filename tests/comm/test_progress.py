"""Who reads the sockets of an endpoint: a waiter takes the lead, and no call is slept through."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlinf.comm import Endpoint, MemoryRegistry
from rlinf.comm.config import CommConfig
from rlinf.comm.handle import Handle
from rlinf.comm.progress import Loop
from rlinf.comm.testing import eventually


def test_a_waiter_needs_no_thread_that_rests() -> None:
    loop = Loop("test")
    try:
        if not loop.poller.rests:
            pytest.skip("there is no epoll and eventfd here")
        late, rest = threading.Event(), loop.poller.rest

        def oversleep(seconds: float | None) -> None:
            rest(seconds)
            late.wait(30)

        eventually(lambda: loop._resting)
        loop.poller.rest = oversleep  # type: ignore[method-assign]
        loop.wake()  # it comes back to rest, and oversleeps the next time
        time.sleep(0.02)
        handle: Handle[int] = Handle("a result", progress=loop)
        loop.call_later(0.01, lambda: handle.set_result(threading.get_ident()))
        assert handle.result(10) == threading.get_ident()
        assert not late.is_set()
        late.set()
    finally:
        late.set()
        loop.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_call_is_slept_through(transport: str) -> None:
    registry = MemoryRegistry()
    config = CommConfig(backend_priority=(transport,))
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        b.serve("echo", lambda request: request.reply(request.payload))

        def ask(seed: int) -> int:
            draw = random.Random(seed)
            for number in range(300):
                assert a.call("echo", number, to="b/0").result(20) == number
                time.sleep(draw.choice((0.0, 0.0002, 0.0015, 0.004)))
            return seed

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(ask, range(3))) == [0, 1, 2]

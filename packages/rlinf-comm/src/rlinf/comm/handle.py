"""Handle: something that will be done. The one such type of the whole project.

It always completes, with a value or with an error. Whoever waits does not merely sleep: a handle
that belongs to an endpoint lets the waiting thread read the sockets itself (`Progress.drive`), so
no other thread is needed to answer it.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from rlinf.comm.errors import Cancelled, Timeout

log = logging.getLogger(__name__)

T = TypeVar("T")


class Default:
    """The type of `DEFAULT`: use the deadline the configuration gives."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default()
DEFAULT_TIMEOUT_S: Final = 30.0

TimeoutLike = float | None | Default


class Progress(Protocol):
    """What a waiter runs so that the handle it waits for gets done."""

    def drive(self, handle: "Handle[Any]", deadline: float | None) -> None:
        """Return when the handle is done or `time.monotonic()` has reached the deadline."""


class Handle(Generic[T]):
    """The future result of an operation. Thread-safe; `await` works on any event loop.

    Args:
        what: The operation in words, for messages: "recv from rollout/3".
        progress: Driven by a waiting thread; None where another thread completes the handle.
        timeout_s: What `DEFAULT` means for waits on this handle; None: for ever.
    """

    __slots__ = (
        "_callbacks",
        "_done",
        "_error",
        "_lock",
        "_progress",
        "_value",
        "_wakers",
        "timeout_s",
        "what",
    )

    def __init__(
        self,
        what: str = "operation",
        *,
        progress: Progress | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.what = what
        self.timeout_s = timeout_s
        self._progress = progress
        self._lock = threading.Lock()
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Handle[T]], None]] | None = None
        self._wakers: list[Callable[[], None]] | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<Handle {self.what}: {state}>"

    # -- the side that waits -------------------------------------------------------------------

    def done(self) -> bool:
        """Whether there is a result or an error; never blocks."""
        return self._done

    def exception(self) -> BaseException | None:
        """The error of a handle that is done; None where it succeeded or is still pending."""
        return self._error

    def wait(self, timeout: TimeoutLike = DEFAULT) -> None:
        """Block until done (with a value or an error), making progress meanwhile.

        Raises:
            Timeout: Not done within `timeout` seconds. The operation itself goes on.
        """
        if self._done:
            return
        limit = self.timeout_s if isinstance(timeout, Default) else timeout
        if limit is None:
            log.info("waiting without a deadline for: %s", self.what)
            deadline = None
        else:
            deadline = time.monotonic() + limit
        if self._progress is not None:
            self._progress.drive(self, deadline)
        else:
            self._sleep(deadline)
        if not self._done:
            raise Timeout(f"{self.what}: not done within {limit} s", operation=self.what)

    def result(self, timeout: TimeoutLike = DEFAULT) -> T:
        """Wait, then return the value or raise the error.

        Raises:
            Timeout: Not done within `timeout` seconds. The operation itself goes on.
        """
        if not self._done:
            self.wait(timeout)
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def cancel(self) -> bool:
        """Give up: complete with `Cancelled` unless already done; says whether it did."""
        return self.set_error(Cancelled(f"{self.what}: cancelled", operation=self.what))

    def add_done_callback(self, callback: "Callable[[Handle[T]], None]") -> None:
        """Call `callback(handle)` once done: at once if it is, else on the completing thread."""
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        self._call(callback)

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            import asyncio

            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def arrive() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            def notify(_: Handle[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(arrive)

            self.add_done_callback(notify)
            yield from arrived.__await__()
        return self.result(0.0)

    # -- the side that completes ---------------------------------------------------------------

    def set_result(self, value: T) -> bool:
        """Complete with a value; the first completion wins, and the answer says whether it did."""
        return self._complete(value, None)

    def set_error(self, error: BaseException) -> bool:
        """Complete with an error; the first completion wins, and the answer says whether it did."""
        return self._complete(None, error)

    def add_waker(self, wake: Callable[[], None]) -> bool:
        """For a `Progress`: call `wake` on completion. False (and no call) if already done."""
        with self._lock:
            if self._done:
                return False
            if self._wakers is None:
                self._wakers = []
            self._wakers.append(wake)
            return True

    def _complete(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._done:
                return False
            self._value, self._error = value, error
            self._done = True
            callbacks, wakers = self._callbacks, self._wakers
            self._callbacks = self._wakers = None
        if callbacks is not None:
            for callback in callbacks:
                self._call(callback)
        if wakers is not None:
            for wake in wakers:
                wake()
        return True

    def _call(self, callback: "Callable[[Handle[T]], None]") -> None:
        try:
            callback(self)
        except Exception:
            log.exception("a done-callback of %r raised", self)

    def _sleep(self, deadline: float | None) -> None:
        gate = threading.Lock()
        gate.acquire()
        if not self.add_waker(gate.release):
            return
        left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        gate.acquire(timeout=min(left, threading.TIMEOUT_MAX))


def wait_all(handles: Sequence[Handle[T]], timeout: TimeoutLike = DEFAULT) -> list[T]:
    """The results of all handles, in their order, within one common deadline.

    The first error (in order of the sequence) is raised with a note naming its handle; the other
    handles are left alone.
    """
    if isinstance(timeout, Default):
        timeout = max((h.timeout_s or 0.0 for h in handles), default=DEFAULT_TIMEOUT_S)
    deadline = None if timeout is None else time.monotonic() + timeout
    results: list[T] = []
    for index, handle in enumerate(handles):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            results.append(handle.result(left))
        except Exception as error:
            error.add_note(f"raised by handle {index} of {len(handles)}: {handle.what}")
            raise
    return results


def awaiting(
    handles: Sequence[Handle[Any]], what: str, timeout_s: float | None = DEFAULT_TIMEOUT_S
) -> Handle[Any]:
    """A handle for the caller to complete when these are done; its waiter drives what drives them.

    They all belong to one endpoint, or to none.
    """
    progress = handles[0]._progress if handles else None
    return Handle(what, progress=progress, timeout_s=timeout_s)


def together(handles: Sequence[Handle[Any]], what: str) -> Handle[None]:
    """A handle that is done once all of these are, or as soon as one fails (with its error)."""
    both: Handle[None] = awaiting(handles, what)
    left = itertools.count(len(handles) - 1, -1)

    def note(handle: Handle[Any]) -> None:
        error = handle.exception()
        if error is not None:
            both.set_error(error)
        elif not next(left):
            both.set_result(None)

    for handle in handles:
        handle.add_done_callback(note)
    if not handles:
        both.set_result(None)
    return both

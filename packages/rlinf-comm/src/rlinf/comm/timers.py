"""Timers: what is to be done later, and deadlines that are mostly never reached.

Both are driven by whoever makes progress; nothing here reads a clock or blocks.
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

from rlinf.comm.handle import Handle

GRAIN_S = 1 / 64


class Timer:
    """One thing to do once at `when`; `cancel` makes it nothing."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Never run the action."""
        self.action = None


class Timers:
    """A heap of timers, and handles in buckets of 1/64 s by deadline (adding one is O(1)).

    Attributes:
        heap: The earliest first: when, a running number, the timer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._buckets: dict[int, dict[int, tuple[Handle[Any], Callable[[], BaseException]]]] = {}

    def call_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Run `action` on the dispatching thread at `when`."""
        timer = Timer(when, action)
        with self._lock:
            heapq.heappush(self.heap, (when, next(self._order), timer))
        return timer

    def expire_at(
        self, when: float, handle: Handle[Any], error: Callable[[], BaseException]
    ) -> None:
        """Complete the handle with `error()` if it is still pending at `when` (or up to 1/64 s on).

        Forget it with `forget` once it is done, else it is kept until then.
        """
        key = int(when / GRAIN_S) + 1
        with self._lock:
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = {}
                action = Timer(key * GRAIN_S, lambda: self._expire(key))
                heapq.heappush(self.heap, (action.when, next(self._order), action))
            bucket[id(handle)] = (handle, error)

    def forget(self, when: float, handle: Handle[Any]) -> None:
        """The handle given to `expire_at(when, ...)` is done."""
        bucket = self._buckets.get(int(when / GRAIN_S) + 1)
        if bucket is not None:
            bucket.pop(id(handle), None)

    def run(self, now: float) -> bool:
        """Run everything due at `now`; says whether there was anything."""
        ran = False
        while self.heap and self.heap[0][0] <= now:
            with self._lock:
                if not self.heap or self.heap[0][0] > now:
                    break
                timer = heapq.heappop(self.heap)[2]
            action, timer.action = timer.action, None
            if action is not None:
                ran = True
                action()
        return ran

    def _expire(self, key: int) -> None:
        with self._lock:
            bucket = self._buckets.pop(key, {})
        for handle, error in list(bucket.values()):
            if not handle.done():
                handle.set_error(error())

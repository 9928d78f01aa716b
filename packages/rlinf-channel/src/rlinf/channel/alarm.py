"""One thread that sleeps until the next deadline of what it keeps time for."""

import logging
import math
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Alarm:
    """Calls `ring(now)` when it is due, and asks it again when that is next.

    Args:
        name: Of the thread.
        ring: Does what is due at `now`; returns when it is due next (`math.inf`: not at all).
    """

    def __init__(self, name: str, ring: Callable[[float], float]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._due = math.inf
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def before(self, when: float) -> None:
        """Something is due at `when`; cheap if the alarm is set for an earlier time already."""
        if when < self._due:
            with self._changed:
                if when < self._due:
                    self._due = when
                    self._changed.notify()

    def close(self) -> None:
        """Ring no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._due - time.monotonic()) > 0:
                    self._changed.wait(None if left == math.inf else left)
                if self._closed:
                    return
                self._due = math.inf
            try:
                self.before(self._ring(time.monotonic()))
            except Exception:
                log.exception("a deadline was not carried out")

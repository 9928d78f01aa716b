"""Deferred: what must wait until the locks are free, because it may call back into anything."""

from collections import deque
from collections.abc import Callable


class Deferred:
    """A queue that whoever has just let go of a lock runs; thread-safe."""

    __slots__ = ("_actions", "add")

    def __init__(self) -> None:
        self._actions: deque[Callable[[], object]] = deque()
        self.add = self._actions.append

    def run(self) -> None:
        """Run everything that was added, in order. To be called without any lock."""
        while self._actions:
            try:
                action = self._actions.popleft()
            except IndexError:  # another thread has taken it
                return
            action()

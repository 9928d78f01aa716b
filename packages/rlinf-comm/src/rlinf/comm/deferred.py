"""Deferred: what must wait until the locks are free, because it may call back into anything."""

from collections import deque
from collections.abc import Callable


class Deferred:
    """A queue that whoever has just let go of a lock runs; thread-safe.

    Attributes:
        actions: What is to be done.
        add: Put something at the end.
    """

    __slots__ = ("actions", "add")

    def __init__(self) -> None:
        self.actions: deque[Callable[[], object]] = deque()
        self.add = self.actions.append

    def run(self) -> None:
        """Run everything that was added, in order. To be called without any lock."""
        while self.actions:
            try:
                action = self.actions.popleft()
            except IndexError:  # another thread has taken it
                return
            action()

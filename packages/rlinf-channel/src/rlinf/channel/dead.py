"""Dead letters: items that came back too often, kept aside where they can be read."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlinf.channel.run import Run

KEPT_ITEMS = 64
KEPT_SHARE = 8
"""The latest dead letters stay readable: so many, and this fraction of the channel's bytes."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An item that was delivered as often as its channel allows and never acknowledged."""

    item: Any
    """As it was put; None where it cannot be decoded here."""
    weight: float
    key: str | None
    deliveries: int
    order: int
    """Its place in the channel, counted from 0 over everything ever put."""
    problem: str
    """Why it cannot be decoded, where it cannot."""


class DeadLetters:
    """Those of one channel. They do not count towards its bounds, so the oldest make room."""

    def __init__(self, buffer_bytes: int) -> None:
        self._most_bytes = buffer_bytes // KEPT_SHARE
        self._kept: deque[Run] = deque()
        self._items = self._nbytes = 0
        self.count = 0
        """All there were, kept or not."""

    def __iter__(self) -> Iterator[Run]:
        return iter(self._kept)

    def bury(self, run: Run) -> None:
        """Keep some more; the newest are kept whatever their size."""
        self.count += run.count
        self._kept.append(run)
        self._items += run.count
        self._nbytes += run.nbytes
        while len(self._kept) > 1 and (self._items > KEPT_ITEMS or self._nbytes > self._most_bytes):
            old = self._kept.popleft()
            self._items -= old.count
            self._nbytes -= old.nbytes

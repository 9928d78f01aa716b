"""Inlet: where the chunks of a stage come from.

An ordinary stage takes from its input until that is closed and empty. The head of a ring (stages
that feed one another) also takes back what it sent round, and is done once everything has left.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from rlinf.channel import Channel, ChannelClosed, Lease
from rlinf.channel import Timeout as ChannelTimeout

__all__ = ["Chunk", "Inlet", "RingInlet"]

LOOK_S = 1.0
"""How often a wait for a chunk looks whether the call was given up."""

Chunk = tuple[Channel, Lease, ExitStack]
"""Where it is from, its items, and what ends their lease."""


@dataclass(slots=True)
class Inlet:
    """Chunks of one channel.

    Attributes:
        source: The channel.
        size: Items of a chunk at most; None: all there are. May be changed between two chunks.
        full: Wait until a chunk has that many (None: until no more will come).
        check: Called often while it waits; raises to give up.
        alone: Nobody else takes from it, or took: a chunk that is all there will be is the last.
    """

    source: Channel
    size: int | None
    full: bool
    check: Callable[[], None]
    alone: bool = False
    _ended: bool = field(default=False, init=False)

    def next(self) -> Chunk | None:
        """The next chunk; None where no more will come."""
        while not self._ended:
            self.check()
            try:
                chunk = self._lease(self.source, LOOK_S, self.full)
            except ChannelTimeout:
                continue
            except ChannelClosed:
                self._ended = True
            else:
                self._ended = self.alone and self.full and self.size is None
                return chunk
        return None

    def _lease(self, source: Channel, timeout_s: float, full: bool) -> Chunk:
        ending = ExitStack()
        lease = ending.enter_context(
            source.lease_batch(max_items=self.size, timeout=timeout_s, full=full)
        )
        return source, lease, ending


@dataclass(slots=True)
class RingInlet(Inlet):
    """Chunks of the input, and of what comes back. What is new goes first.

    Attributes:
        ring: The channels of the ring in order. None of them may have been used, except by an
            earlier incarnation of this worker.
    """

    ring: tuple[Channel, ...] = ()
    _inside: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._inside = _settled_items(self.ring)

    def next(self) -> Chunk | None:
        """See `Inlet`."""
        while not self._ended or self._inside:
            self.check()
            try:
                return self._new() or self._lease(self.ring[-1], LOOK_S, full=False)
            except ChannelTimeout:
                continue
            except ChannelClosed:
                self._ended = True
        return None

    def passed(self, source: Channel, again: int, items: int) -> None:
        """Of a chunk's `items` so many go round `again`; the others have left."""
        self._inside += again - (items if source is self.ring[-1] else 0)

    def _new(self) -> Chunk | None:
        if self._ended:
            return None
        try:
            return self._lease(self.source, 0.0 if self._inside else LOOK_S, self.full)
        except ChannelTimeout:
            if self._inside:
                return None
            raise


def _settled_items(channels: tuple[Channel, ...]) -> int:
    """Items in all of them together, which move from one to the next meanwhile."""
    seen = None
    while True:
        looks = [channel.statistics() for channel in channels]
        moved = [look.put_items for look in looks]
        if moved == seen:
            return sum(look.depth + look.leased_items for look in looks)
        seen = moved
        if not any(moved):
            return 0
        time.sleep(0.01)

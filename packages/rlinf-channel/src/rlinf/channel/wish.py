"""What a consumer asks for, and the request while it is on its way."""

import time
from typing import NamedTuple

from rlinf.channel.link import Reply
from rlinf.channel.spans import Ranges
from rlinf.comm.handle import Handle


class Wish(NamedTuple):
    """What a take asks for; the fields of the wire."""

    max_items: int | None = 1
    target_weight: float | None = None
    full: bool = False
    key: str | None = None
    wait: bool = True
    along: int = 0
    alone: bool = True
    """See `messages.Take`."""

    @property
    def even(self) -> int:
        """How many items every batch of this kind has; 0 where that depends on their weight."""
        return (self.max_items or 0) if self.full and self.target_weight is None else 0


class Ask:
    """One take on its way."""

    __slots__ = ("abandoned", "absorbed", "done", "number", "reply", "sent_at")

    def __init__(self, number: int, reply: Handle[Reply], done: Ranges = ()) -> None:
        self.number = number
        self.reply = reply
        self.done = done
        """Tags which it acknowledges."""
        self.sent_at = time.monotonic()
        self.abandoned = False
        self.absorbed = False

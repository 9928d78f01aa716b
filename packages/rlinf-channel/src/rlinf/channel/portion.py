"""How much of a lane one request gets: pure decisions."""

import math

from rlinf.channel.lane import TOLERANCE, Lane, batch
from rlinf.channel.messages import Take
from rlinf.channel.run import Run

PREFETCH_BYTES = 32 * 2**20
"""One delivery brings along about as much as this, reckoned by the usual size of an item."""


class Portions:
    """Portions of one channel's lanes.

    Args:
        max_deliveries: How often an item is given out. One that was given back half as often is
            suspected of killing consumers, and goes alone.
    """

    def __init__(self, max_deliveries: int | None) -> None:
        self._suspicious = math.inf if max_deliveries is None else (max_deliveries + 1) // 2
        self.returned = 0
        """Items that went back and are queued again (or more, never less)."""

    def ready(self, take: Take, lane: Lane, *, last: bool, crowded: bool) -> bool:
        """Whether a request can be met.

        Args:
            take: The request.
            lane: What it asks for; not empty.
            last: Nothing will be added to the lane any more.
            crowded: A producer waits for room.
        """
        if not take.full or last:
            return True
        if self.returned and self._suspect(lane.head()):
            return True
        # A bound that is reached before the batch is complete would wait for ever: give what fits.
        if crowded and (take.max_items is not None or take.target_weight is not None):
            return True
        if take.max_items is not None and lane.count >= take.max_items:
            return True
        if take.target_weight is None or lane.weight < take.target_weight * (1 - 2 * TOLERANCE):
            return False
        return batch(lane, take.max_items, take.target_weight)[1]

    def pick(self, take: Take, lane: Lane, sharers: int, usual_nbytes: float) -> int:
        """How many items from the front a request which is ready gets.

        Args:
            take: The request.
            lane: What it asks for; not empty.
            sharers: Consumers to leave something for, this one included.
            usual_nbytes: The mean size of the channel's items.
        """
        if take.full:
            count = batch(lane, take.max_items, take.target_weight)[0]
            if take.along and count == take.max_items:
                more = min(_share(lane, sharers, usual_nbytes), count + take.along)
                count = max(count, more // count * count)
        elif take.max_items == 1 or lane.count == 1:
            return 1
        else:
            share = _share(lane, sharers, usual_nbytes)
            count = share if take.max_items is None else min(share, take.max_items)
        return self._unsuspected(lane, count) if self.returned else count

    def _unsuspected(self, lane: Lane, count: int) -> int:
        """How many of the first so many go together; a suspect goes alone."""
        before = 0
        for run in lane:
            if before >= count:
                break
            if self._suspect(run):
                return max(before, 1)
            before += run.count
        return count

    def _suspect(self, run: Run) -> bool:
        return run.returns >= self._suspicious


def _share(lane: Lane, sharers: int, usual_nbytes: float) -> int:
    """How many items one request may bring along: its part, and not too many bytes."""
    share = math.ceil(lane.count / max(1, sharers))
    return max(1, min(share, int(PREFETCH_BYTES / max(usual_nbytes, 1.0))))

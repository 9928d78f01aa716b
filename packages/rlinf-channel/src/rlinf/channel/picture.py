"""What a queue says of itself."""

from typing import TYPE_CHECKING

from rlinf.channel.statistics import ChannelStatistics

if TYPE_CHECKING:
    from rlinf.channel.core import Queue


def picture(queue: "Queue", now: float) -> ChannelStatistics:
    """A queue at this moment."""
    intake, consumers = queue._intake, queue._consumers
    return ChannelStatistics(
        name=queue.name,
        policy=queue.config.type,
        max_items=queue.config.max_items,
        max_bytes=queue.config.buffer_bytes,
        depth=len(queue),
        leased_items=consumers.leased_items,
        held_bytes=intake.held_bytes,
        put_items=intake.admitted,
        put_bytes=intake.admitted_bytes,
        acknowledged_items=queue._acknowledged,
        rejected_items=queue._rejected,
        redelivered_items=queue._redelivered,
        dead_items=queue.dead.count,
        duplicate_items=intake.duplicates,
        waiting_producers=len(intake.line),
        waiting_consumers=len(queue._waiting),
        closed=queue.closed,
        consumers=tuple(c.statistics(now) for c in consumers.known.values()),
    )

"""Standstill: a put waits for room, and whoever could make some waits for that put. Pure."""

from collections.abc import Collection, Iterable

from rlinf.channel.consumers import Consumer
from rlinf.channel.messages import Take

STANDSTILL_S = 2.0
"""Nothing has moved for so long before a standstill is called one: longer than between two of the
short takes by which a stage waits, so that none is taken for a change of mind."""


def stands_still(consumers: Iterable[Consumer], waiting: Collection[Take], *, queued: bool) -> bool:
    """Whether no consumer will make room before a put is let in that has no room.

    Everyone who holds items has asked for more and does nothing else meanwhile; and what is
    queued, if anything is, is kept for takes of everything until the channel is closed.

    Args:
        consumers: All of the channel.
        waiting: The takes which cannot be met with what is queued.
        queued: Whether anything is.
    """
    if not waiting or (queued and not all(map(_of_everything, waiting))):
        return False
    takes = {take.consumer: take for take in waiting}
    return all(_blocked(takes.get(one.id), one) for one in consumers if one.leased)


def _of_everything(take: Take) -> bool:
    bounds = (take.max_items, take.target_weight, take.key)
    return take.full and bounds == (None, None, None)


def _blocked(take: Take | None, consumer: Consumer) -> bool:
    """Whether the consumer waits for this take's answer, with all it was given in its hands."""
    return (
        take is not None
        and take.alone
        and take.ask > consumer.answered  # a repeated message is not waited for
        and (take.holds is None or take.holds >= consumer.leased.count)
    )

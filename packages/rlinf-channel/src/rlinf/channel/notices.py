"""What a server says of a channel: to whoever is told no, who waits, and in the log."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf.channel.config import ChannelConfig
from rlinf.channel.messages import Buried, ClientId, Released
from rlinf.channel.spans import length
from rlinf.channel.statistics import MOST_LISTED, ChannelStatistics, Waiting
from rlinf.comm.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Open:
    """A request that is not answered yet."""

    request: Request
    since: float
    ask: tuple[ClientId, int] | None = None


def in_words(state: ChannelStatistics, config: ChannelConfig) -> str:
    """The channel in words, for whoever is told no."""
    bound = config.max_items
    words = [
        f"{state.depth}{f' of {bound}' if bound else ''} item(s) queued",
        f"{state.held_bytes} of {config.buffer_bytes} bytes held",
    ]
    held = [f"{c.leased_items} by {c.id}" for c in state.consumers if c.leased_items]
    if held:
        words.append(f"leased: {', '.join(held)}")
    words.append(f"{state.waiting_consumers} consumer(s) wait")
    return ", ".join(words)


def unanswered(entries: Mapping[int, Open], now: float) -> dict[str, tuple[Waiting, ...]]:
    """Whose requests are not answered yet, by channel, the longest first."""
    found: dict[str, list[Waiting]] = {}
    for entry in list(entries.values()):  # another thread may be answering some
        operation, channel, number, _, *fields = entry.request.payload
        where = fields[1][0] if operation == "commit" else channel
        who = f"{entry.request.source}#{number}"
        found.setdefault(where, []).append(Waiting(who, operation, now - entry.since))
    return {name: tuple(who[:MOST_LISTED]) for name, who in found.items()}


def log_released(channel: str, released: Released) -> None:
    """Items went back to the queue."""
    log.info(
        "channel %s: %d item(s) of %s are back in the queue: %s",
        channel,
        length(released.tags),
        released.consumer,
        "its lease ran out" if released.expired else "it is gone",
    )


def log_buried(channel: str, buried: Buried) -> None:
    """An item is a dead letter."""
    run = buried.run
    key = f", key {run.key!r}" if run.key is not None else ""
    for offset in range(run.count):
        weight = run.weight / run.count
        log.error(
            "channel %s: item %d (weight %g%s) was given out %d times and never acknowledged, last "
            "by %s: it is kept aside, see Channel.dead_letters",
            channel,
            run.order + offset,
            weight,
            key,
            run.returns,
            buried.consumer,
        )

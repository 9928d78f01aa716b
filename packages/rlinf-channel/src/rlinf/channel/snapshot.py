"""What the monitor knows of a job at one moment, and what two moments tell: pure, no I/O."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace

from rlinf.channel.life import Incident, Life
from rlinf.channel.statistics import ChannelStatistics, Holder, LockStatistics, ServerStatistics

MOST_ENTRIES = 100
"""So much of the log is in JSON."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One worker of the job, as its registry knows it; `gone`: its process is seen not to run."""

    id: str
    pid: int
    host: str
    device: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment.

    Attributes:
        server: What the channel server said.
        peers: Who is registered.
        answered_s: Seconds the server took to answer.
        life: What the job's controller said last, with the spans of a while; None: it has none.
        log: What happened since somebody looks, oldest first.
    """

    server: ServerStatistics
    peers: tuple[Peer, ...] = ()
    answered_s: float = 0.0
    life: Life | None = None
    log: tuple[Incident, ...] = ()


@dataclass(frozen=True, slots=True)
class Rate:
    """What went through a channel in one second."""

    put_items: float = 0.0
    put_bytes: float = 0.0
    done_items: float = 0.0


@dataclass(frozen=True, slots=True)
class Blocked:
    """Who waits for devices, and for whom: those that hold some of them, or stand before it."""

    waiter: Holder
    behind: tuple[Holder, ...]


def rates(before: Snapshot | None, after: Snapshot) -> Mapping[str, Rate]:
    """By channel, over the server's time between the two.

    A channel that is new since then has been filled since then; without a `before`, or after a
    restart of the server, the average of the server's life.
    """
    earlier: Mapping[str, ChannelStatistics] = {}
    seconds = after.server.up_s
    if before is not None and before.server.up_s < after.server.up_s:
        earlier = {channel.name: channel for channel in before.server.channels}
        seconds -= before.server.up_s
    return {one.name: _rate(earlier.get(one.name), one, seconds) for one in after.server.channels}


def _rate(before: ChannelStatistics | None, after: ChannelStatistics, seconds: float) -> Rate:
    if seconds <= 0:
        return Rate()
    if before is None or before.put_items > after.put_items:  # another one of the same name
        then = (0, 0, 0)
    else:
        then = before.put_items, before.put_bytes, _done(before)
    now = after.put_items, after.put_bytes, _done(after)
    return Rate(*((b - a) / seconds for a, b in zip(then, now, strict=True)))


def _done(channel: ChannelStatistics) -> int:
    return channel.acknowledged_items + channel.rejected_items


def blocked(lock: LockStatistics) -> tuple[Blocked, ...]:
    """Every waiter of the device lock, first in line first."""
    found: list[Blocked] = []
    for index, waiter in enumerate(lock.waiters):
        before = (*lock.holders, *lock.waiters[:index])
        behind = tuple(one for one in before if not set(one.devices).isdisjoint(waiter.devices))
        found.append(Blocked(waiter, behind))
    return tuple(found)


def as_json(
    snapshot: Snapshot, before: Snapshot | None = None, after: int = 0
) -> dict[str, object]:
    """The snapshot as what `json.dumps` takes; a number that is not finite becomes None.

    Of the log it has the last entries, of the spans those numbered above `after`, each as
    `[number, worker, kind, name, iteration, start, end]`.
    """
    now = rates(before, snapshot)
    life = snapshot.life
    spans = () if life is None else tuple(span for span in life.spans if span.number > after)
    if life is not None:
        snapshot = replace(snapshot, life=replace(life, spans=(), incidents=()))
    snapshot = replace(snapshot, log=snapshot.log[-MOST_ENTRIES:])
    whole: dict[str, object] = asdict(snapshot) | {"spans": [astuple(span) for span in spans]}
    server = whole["server"]
    assert isinstance(server, dict)
    for row, channel in zip(server["channels"], snapshot.server.channels, strict=True):
        row["balance"] = channel.balance
        row["rate_per_s"] = asdict(now[channel.name])
    for row, wait in zip(server["lock"]["waiters"], blocked(snapshot.server.lock), strict=True):
        row["behind"] = [holder.id for holder in wait.behind]
    return {str(key): _finite(value) for key, value in whole.items()}


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_finite(one) for one in value]
    return value

"""What is wrong with a job just now, and the log of what happened: pure, no I/O."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlinf.channel.life import Incident, WorkerLife
from rlinf.channel.snapshot import Snapshot, blocked
from rlinf.channel.statistics import ChannelStatistics

FULL_S = 0.5
"""Somebody who waits so long for room makes a channel a full one."""
SKEWED, SKEWED_ITEMS = 1.5, 4
"""More than this many times the work of another, once so many items a consumer are done."""
HELD_S = 60.0
"""Whoever waits so long for devices is worth a line."""
MISSED_BEATS = 3.0
"""So many heartbeats without an answer are a silence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        kind: gone, silent, full, imbalance or lock.
        who: The worker or the channel.
        text: What, with its figures, for a person.
    """

    kind: str
    who: str
    text: str


def findings(snapshot: Snapshot) -> tuple[Finding, ...]:
    """All that is wrong, the worst first; one of a kind for each worker or channel."""
    found: dict[tuple[str, str], Finding] = {}
    for one in (*_workers(snapshot), *_channels(snapshot), *_lock(snapshot)):
        found.setdefault((one.kind, one.who), one)
    return tuple(found.values())


def _workers(snapshot: Snapshot) -> Iterator[Finding]:
    workers = snapshot.life.workers if snapshot.life is not None else ()
    for worker in workers:
        if not worker.running and worker.restarts:
            text = f"{worker.id} died and is being started again (restart {worker.restarts})"
            yield Finding("gone", worker.id, text)
        elif worker.running and _is_silent(worker):
            text = f"{worker.id} gives no sign of life for {worker.heard_s:.0f} s"
            yield Finding("silent", worker.id, text)
    for peer in snapshot.peers:
        if peer.gone:
            yield Finding("gone", peer.id, f"{peer.id}: its process {peer.pid} is gone")


def _is_silent(worker: WorkerLife) -> bool:
    return worker.heard_s > MISSED_BEATS * worker.beat_s


def _channels(snapshot: Snapshot) -> Iterator[Finding]:
    for channel in snapshot.server.channels:
        waits = [wait for wait in channel.waiting if wait.operation in ("put", "commit")]
        longest = max(waits, key=lambda wait: wait.since_s, default=None)
        if longest is not None and longest.since_s >= FULL_S:
            text = (
                f"{channel.name} is full ({_bound(channel)}): {longest.id} waits to put for "
                f"{longest.since_s:.1f} s"
            )
            yield Finding("full", channel.name, text)
        done = sum(one.finished_items for one in channel.consumers)
        if channel.balance > SKEWED and done >= SKEWED_ITEMS * len(channel.consumers):
            yield Finding("imbalance", channel.name, _imbalance(channel))


def _bound(channel: ChannelStatistics) -> str:
    if channel.max_items is not None and channel.depth >= channel.max_items:
        return f"{channel.depth} of {channel.max_items} items"
    return f"{channel.held_bytes:,} of {channel.max_bytes:,} bytes"


def _imbalance(channel: ChannelStatistics) -> str:
    by_work = sorted(channel.consumers, key=lambda one: one.finished_weight / one.capacity)
    least, most = by_work[0], by_work[-1]
    times = f"{channel.balance:.1f} times" if least.finished_weight else "all"
    return (
        f"{channel.name} is uneven: for its speed {most.id} did {times} the work of {least.id} "
        f"({most.finished_weight:g} and {least.finished_weight:g})"
    )


def _lock(snapshot: Snapshot) -> Iterator[Finding]:
    for wait in blocked(snapshot.server.lock):
        if wait.waiter.since_s >= HELD_S:
            behind = ", ".join(holder.id for holder in wait.behind)
            text = (
                f"{wait.waiter.id} waits for {', '.join(wait.waiter.devices)} for "
                f"{wait.waiter.since_s:.0f} s, behind {behind}"
            )
            yield Finding("lock", wait.waiter.id, text)


class Log:
    """What the job told, and what began and ended to be wrong, in order.

    Args:
        keep: Entries, at most.
    """

    def __init__(self, keep: int = 500) -> None:
        self._entries: deque[Incident] = deque(maxlen=keep)
        self._open: dict[tuple[str, str], Finding] = {}
        self._count = 0

    @property
    def entries(self) -> tuple[Incident, ...]:
        """Oldest first."""
        return tuple(self._entries)

    def take(
        self, incidents: Iterable[Incident], found: Iterable[Finding], now: float
    ) -> tuple[Incident, ...]:
        """Add what the job told and what changed among the findings; all entries."""
        for told in incidents:
            self._add(told.at, told.kind, told.who, told.text)
        present = {(one.kind, one.who): one for one in found}
        for one in (present[key] for key in present.keys() - self._open.keys()):
            self._add(now, one.kind, one.who, one.text)
        for one in (self._open[key] for key in self._open.keys() - present.keys()):
            self._add(now, "over", one.who, f"{one.who} {ENDS[one.kind]}")
        self._open = present
        return self.entries

    def _add(self, at: float, kind: str, who: str, text: str) -> None:
        self._count += 1
        self._entries.append(Incident(self._count, at, kind, who, text))


ENDS = {
    "gone": "is there again",
    "silent": "answers again",
    "full": "has room again",
    "imbalance": "is even again",
    "lock": "waits no longer",
}
"""Kind of a finding -> how its end is said."""

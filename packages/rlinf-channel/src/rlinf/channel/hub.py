"""All channels of one server as one pure machine, so that a commit across two is atomic."""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlinf.channel.config import ChannelConfig
from rlinf.channel.core import Queue
from rlinf.channel.errors import ChannelBusy, ChannelUnknown, ConfigMismatch
from rlinf.channel.journal import ChannelState, Deleted, Opened, Record
from rlinf.channel.messages import (
    Accepted,
    Cancel,
    Command,
    Commit,
    Event,
    Gone,
    Refusal,
    Refused,
    Released,
    Settle,
    Tick,
)
from rlinf.channel.revival import load, save
from rlinf.channel.spans import Spans, length

Addressed = tuple[str, Command]
"""A command and the channel it comes from."""


class Hub:
    """Every queue of one server. Not thread-safe: its owner serialises the calls.

    A commit is a put in one queue and a settlement in another, carried out in the same call:
    nobody can see, or be left with, one without the other.

    Args:
        server: Its name, for errors.
        incarnation: Above every birth and tag of an earlier server of this name, so its epoch.
        durable: Whether to keep records, see `records`.
    """

    def __init__(self, server: str, *, incarnation: int = 0, durable: bool = False) -> None:
        self._server = server
        self._incarnation = incarnation
        self._births = itertools.count(incarnation)
        self._queues: dict[str, Queue] = {}
        self._commits: dict[int, Commit] = {}
        self._journal: list[Record] | None = [] if durable else None
        self.wake_at = math.inf
        """When `tick` should be called next: never too late, sometimes too early."""

    def create(self, name: str, config: ChannelConfig) -> Queue:
        """A new channel, or the one of this name if it has the same configuration."""
        queue = self._queues.get(name)
        if queue is None:
            birth = next(self._births)
            queue = self._queues[name] = self._make(name, config, birth)
            if self._journal is not None:
                self._journal.append(Opened(name, birth, config))
        elif queue.config != config:
            raise ConfigMismatch(name, config.differences(queue.config))
        return queue

    def _make(self, name: str, config: ChannelConfig, birth: int) -> Queue:
        first_tag = self._incarnation
        return Queue(name, config, birth=birth, first_tag=first_tag, journal=self._journal)

    def get(self, name: str) -> Queue:
        """The channel of this name; `ChannelUnknown` if there is none."""
        try:
            return self._queues[name]
        except KeyError:
            raise ChannelUnknown(name, self._server, sorted(self._queues)) from None

    def delete(self, name: str) -> None:
        """Forget a closed and drained channel; `ChannelBusy` if it is not."""
        queue = self.get(name)
        if not queue.closed:
            raise ChannelBusy(name, "it is still open")
        if not queue.drained:
            raise ChannelBusy(name, "it still holds items")
        del self._queues[name]
        if self._journal is not None:
            self._journal.append(Deleted(name))

    def records(self) -> list[Record]:
        """What has happened since this was called last: keep all of it before anybody is told."""
        if not self._journal:
            return []
        records = self._journal.copy()
        self._journal.clear()
        return records

    def save(self) -> dict[str, ChannelState]:
        """What the records so far add up to."""
        return {queue.name: save(queue) for queue in self._queues.values()}

    def load(self, channels: Mapping[str, ChannelState]) -> None:
        """Go on from what another server knew, as a hub that was just made."""
        for state in channels.values():
            queue = self._queues[state.name] = self._make(state.name, state.config, state.birth)
            load(queue, state)

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._queues.values())

    def step(self, name: str, event: Event, now: float) -> list[Addressed]:
        """One event for one channel, and everything that follows from it."""
        return self._follow(deque(self._step(name, event, now)), now)

    def _step(self, name: str, event: Event, now: float) -> list[Addressed]:
        queue = self.get(name)
        commands = [(name, command) for command in queue.step(event, now)]
        self.wake_at = min(self.wake_at, queue.wake_at)
        return commands

    def commit(self, commit: Commit, now: float) -> list[Addressed]:
        """Put the outputs and settle the inputs together, now or as soon as there is room.

        Refused with LEASE_LOST if the consumer does not hold every tag, or loses one meanwhile.
        A repeated commit gets the answer of the first.
        """
        source, target, put = self.get(commit.source), self.get(commit.target), commit.put
        if put.first >= target.expects(put.producer):
            if source.missing(commit.consumer, commit.tags):
                return self.step(commit.target, replace(put, void=Refusal.LEASE_LOST), now)
            self._commits[put.request] = commit
        return self.step(commit.target, put, now)

    def gone(self, worker: str, epoch: int, now: float) -> list[Addressed]:
        """An incarnation of a worker is lost: tell every channel."""
        event = Gone(worker, epoch)
        return [c for name in list(self._queues) for c in self.step(name, event, now)]

    def tick(self, now: float) -> list[Addressed]:
        """Let every channel look at the clock which asked for it."""
        due = [queue.name for queue in self._queues.values() if queue.wake_at <= now]
        commands = [c for name in due for c in self.step(name, Tick(), now)]
        self.wake_at = min((q.wake_at for q in self._queues.values()), default=math.inf)
        return commands

    def _follow(self, work: deque[Addressed], now: float) -> list[Addressed]:
        done: list[Addressed] = []
        while work:
            name, command = work.popleft()
            if self._commits:
                if isinstance(command, Released):
                    work.extend(self._cancel_commits(name, command, now))
                elif isinstance(command, Accepted | Refused):
                    commit = self._commits.pop(command.request, None)
                    if commit and isinstance(command, Accepted):
                        work.extend(self._settle(commit, now))
                    elif commit and command == Refused(command.request, Refusal.CANCELLED):
                        command = Refused(
                            command.request, Refusal.LEASE_LOST, 0, length(commit.tags)
                        )
            done.append((name, command))
        return done

    def _settle(self, commit: Commit, now: float) -> list[Addressed]:
        settle = Settle(None, commit.consumer, commit.tags)
        return self._step(commit.source, settle, now)

    def _cancel_commits(self, name: str, released: Released, now: float) -> list[Addressed]:
        tags = Spans(released.tags)
        lost = [
            commit
            for commit in self._commits.values()
            if commit.source == name
            and commit.consumer == released.consumer
            and tags.common(commit.tags)
        ]
        cancels = [(commit.target, Cancel(commit.put.request)) for commit in lost]
        return [c for target, cancel in cancels for c in self._step(target, cancel, now)]

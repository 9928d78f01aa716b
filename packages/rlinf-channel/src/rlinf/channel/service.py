"""The server's side of every channel: requests to events, commands to replies."""

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from rlinf.channel.archive import Archive
from rlinf.channel.batching import Crate, claims, shelve, wires
from rlinf.channel.config import ChannelConfig
from rlinf.channel.core import Queue
from rlinf.channel.errors import ChannelError, ServerLost, SpoolFailed, SpoolFull
from rlinf.channel.hub import Addressed, Hub
from rlinf.channel.link import OK, REFUSED, REPLACED, Reply, describe
from rlinf.channel.messages import (
    Accepted,
    Attach,
    Buried,
    Cancel,
    ClientId,
    Close,
    Commit,
    Delivered,
    Event,
    Left,
    Outcome,
    Put,
    Recall,
    Recalled,
    Refusal,
    Refused,
    Released,
    Renew,
    Resume,
    Settle,
    Take,
)
from rlinf.channel.notices import Open, in_words, log_buried, log_released, unanswered
from rlinf.channel.run import total
from rlinf.channel.session import CLIENT_SERVICE
from rlinf.channel.spans import Ranges
from rlinf.channel.statistics import ChannelStatistics
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.handle import Handle
from rlinf.comm.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Caller:
    """One request while it is turned into events."""

    request: Request
    client: ClientId
    channel: str
    now: float
    replies: list[Reply] = field(default_factory=list)
    """What is known at once, sent after the records are kept."""


class ChannelService:
    """Every channel of one server. Runs on whichever thread brings a request; waits for nothing
    but, where there is a spool, for its disk.
    """

    def __init__(self, endpoint: Endpoint, config: ChannelConfig, archive: Archive) -> None:
        self._endpoint = endpoint
        self._config = config
        self._archive = archive
        self._hub = Hub(str(endpoint.id), incarnation=endpoint.epoch, durable=archive.durable)
        self._hub.load(archive.found.channels)
        archive.savers.append(lambda state: state.channels.update(self._hub.save()))
        self._lock = archive.lock
        self._numbers = itertools.count(1)
        self._open: dict[int, Open] = {}
        self._asks: dict[tuple[ClientId, int], int] = {}
        self._full = ""
        """Why the disk had no room, when that was so last."""
        self._operations: dict[str, Callable[..., list[Addressed]]] = {
            "cancel": self._cancel,
            "close": self._close,
            "commit": self._commit,
            "connect": self._connect,
            "create": self._create,
            "dead_letters": self._dead_letters,
            "delete": self._delete,
            "put": self._put,
            "qsize": self._qsize,
            "recalled": self._recalled,
            "renew": self._renew,
            "resume": self._resume,
            "settle": self._settle,
            "statistics": self._statistics,
            "take": self._take,
        }

    def handle(self, request: Request) -> float:
        """Carry one request out; when the clock should be looked at next."""
        now = time.monotonic()
        operation, channel, number, incarnation, *fields = request.payload
        if incarnation and incarnation != self._endpoint.epoch:
            request.reply((REPLACED, self._endpoint.epoch))
            return self._hub.wake_at
        client = ClientId(str(request.source), request.epoch, number)
        caller = _Caller(request, client, channel, now)
        try:
            with self._lock:
                self._archive.check()
                commands = self._operations[operation](caller, *fields)
                self._keep()
        except ChannelError as error:
            if isinstance(error, SpoolFailed):
                self._refuse_all(error)
            if not request.answered():
                request.reply(describe(error))
            return self._hub.wake_at
        for reply in caller.replies:
            request.reply(reply)
        self._carry_out(commands, now)
        return self._hub.wake_at

    def gone(self, worker: str, epoch: int) -> None:
        """An incarnation of a worker is lost."""
        now = time.monotonic()
        self._carry_out(self._unasked(lambda: self._hub.gone(worker, epoch, now)), now)

    def tick(self, now: float) -> float:
        """Do what is due; when something is due next."""
        self._carry_out(self._unasked(lambda: self._hub.tick(now)), now)
        return self._hub.wake_at

    def statistics(self) -> tuple[ChannelStatistics, ...]:
        """Every channel."""
        now = time.monotonic()
        with self._lock:
            pictures = [queue.statistics(now) for queue in self._hub]
        waiting = unanswered(self._open, now)
        return tuple(replace(one, waiting=waiting.get(one.name, ())) for one in pictures)

    def close(self) -> None:
        """Tell everybody who waits that the server ends."""
        with self._lock:
            left, self._open = self._open, {}
        for entry in left.values():
            server = str(self._endpoint.id)
            channel = entry.request.payload[1]
            entry.request.reply(describe(ServerLost(channel, server, "wait", "it was closed")))

    # Under the lock

    def _keep(self) -> None:
        """See that what has just happened outlives this process, before anybody is told."""
        if self._archive.durable:
            self._archive.keep(self._hub.records())

    def _unasked(self, step: Callable[[], list[Addressed]]) -> list[Addressed]:
        """A step that no request asked for; nothing, if the spool fails."""
        with self._lock:
            try:
                self._archive.check()
                commands = step()
                self._keep()
            except SpoolFailed as error:
                self._refuse_all(error)
                return []
        return commands

    def _refuse_all(self, error: SpoolFailed) -> None:
        """What happened last cannot be promised: say so to whoever waits."""
        left, self._open = self._open, {}
        for entry in left.values():
            entry.request.reply(describe(error))

    def _welcome(self, queue: Queue) -> Reply:
        """What a client must know of the channel and of this incarnation of the server."""
        return (OK, asdict(queue.config), self._endpoint.epoch, queue.birth, self._archive.survives)

    # Requests, under the lock

    def _create(
        self, caller: _Caller, config: dict[str, object] | None, capacity: float
    ) -> list[Addressed]:
        wanted = self._config if config is None else ChannelConfig.from_dict(config)
        self._hub.create(caller.channel, wanted)
        return self._connect(caller, capacity)

    def _connect(self, caller: _Caller, capacity: float) -> list[Addressed]:
        queue = self._hub.get(caller.channel)
        caller.replies.append(self._welcome(queue))
        if capacity == 1.0:
            return []
        return self._step(caller, Attach(caller.client, capacity))

    def _resume(
        self,
        caller: _Caller,
        config: dict[str, object],
        capacity: float,
        following: int,
        outstanding: Ranges,
    ) -> list[Addressed]:
        """A client of an earlier incarnation goes on with this one."""
        queue = self._hub.create(caller.channel, ChannelConfig.from_dict(config))
        caller.replies.append((*self._welcome(queue), queue.expects(caller.client)))
        commands = self._step(caller, Attach(caller.client, capacity))
        return commands + self._step(caller, Resume(caller.client, following, outstanding))

    def _delete(self, caller: _Caller) -> list[Addressed]:
        self._hub.delete(caller.channel)
        caller.replies.append((OK,))
        return []

    def _dead_letters(self, caller: _Caller) -> list[Addressed]:
        dead = tuple(self._hub.get(caller.channel).dead)
        facts = tuple(
            (total(run.weights, at, at + 1), run.key, run.returns, run.order + at - run.first)
            for run in dead
            for at in range(run.first, run.end)
        )
        caller.replies.append((OK, facts, wires(dead)))
        return []

    def _qsize(self, caller: _Caller) -> list[Addressed]:
        caller.replies.append((OK, len(self._hub.get(caller.channel))))
        return []

    def _statistics(self, caller: _Caller) -> list[Addressed]:
        picture = self._hub.get(caller.channel).statistics(caller.now)
        waiting = unanswered(self._open, caller.now).get(caller.channel, ())
        caller.replies.append((OK, replace(picture, waiting=waiting)))
        return []

    def _close(self, caller: _Caller) -> list[Addressed]:
        self._hub.get(caller.channel)
        return self._step(caller, Close(self._ticket(caller)))

    def _put(
        self, caller: _Caller, first: int, wire: tuple[object, ...], timeout_s: float | None
    ) -> list[Addressed]:
        self._hub.get(caller.channel)
        runs = shelve(Crate(*wire), caller.channel)  # type: ignore[arg-type]
        put = Put(self._ticket(caller), caller.client, first, runs, _deadline(caller, timeout_s))
        return self._step(caller, self._reserve(put))

    def _reserve(self, put: Put) -> Put:
        """The put, or where the disk has no room for it, one that uses its numbers up."""
        if self._archive.durable:
            try:
                self._archive.reserve(put.runs)
            except SpoolFull as error:
                self._full = error.reason
                return replace(put, void=Refusal.NO_SPACE)
        return put

    def _take(
        self,
        caller: _Caller,
        ask: tuple[int, Ranges],
        wish: tuple[object, ...],
        timeout_s: float | None,
    ) -> list[Addressed]:
        self._hub.get(caller.channel)
        number, done = ask
        max_items, target_weight, full, key, wait, along, alone, holds = wish
        take = Take(
            self._ticket(caller, number),
            caller.client,
            max_items,  # type: ignore[arg-type]
            target_weight,  # type: ignore[arg-type]
            bool(full),
            key,  # type: ignore[arg-type]
            _deadline(caller, timeout_s),
            bool(wait),
            done,
            along,  # type: ignore[arg-type]
            holds,  # type: ignore[arg-type]
            number,
            bool(alone),
        )
        return self._step(caller, take)

    def _settle(self, caller: _Caller, tags: Ranges, outcome: str) -> list[Addressed]:
        self._hub.get(caller.channel)
        settle = Settle(self._ticket(caller), caller.client, tags, Outcome(outcome))
        return self._step(caller, settle)

    def _recalled(self, caller: _Caller, tags: Ranges) -> list[Addressed]:
        caller.replies.append((OK,))
        return self._step(caller, Recalled(caller.client, tags))

    def _renew(self, caller: _Caller, held: Ranges, done: Ranges, asks: Ranges) -> list[Addressed]:
        self._hub.get(caller.channel)
        commands = self._step(caller, Settle(None, caller.client, done)) if done else []
        renew = Renew(self._ticket(caller), caller.client, held, asks)
        return commands + self._step(caller, renew)

    def _cancel(self, caller: _Caller, ask: int) -> list[Addressed]:
        caller.replies.append((OK,))
        number = self._asks.get((caller.client, ask))
        return [] if number is None else self._step(caller, Cancel(number))

    def _commit(
        self,
        caller: _Caller,
        tags: Ranges,
        target: tuple[str, int, int],
        wire: tuple[object, ...],
        timeout_s: float | None,
    ) -> list[Addressed]:
        name, number, first = target
        self._hub.get(caller.channel)
        self._hub.get(name)
        producer = ClientId(caller.client.worker, caller.client.epoch, number)
        runs = shelve(Crate(*wire), name)  # type: ignore[arg-type]
        deadline = _deadline(caller, timeout_s)
        put = Put(self._ticket(caller), producer, first, runs, deadline, atomic=True)
        commit = Commit(caller.channel, name, caller.client, tags, self._reserve(put))
        return self._hub.commit(commit, caller.now)

    def _step(self, caller: _Caller, event: Event) -> list[Addressed]:
        return self._hub.step(caller.channel, event, caller.now)

    def _ticket(self, caller: _Caller, ask: int | None = None) -> int:
        number = next(self._numbers)
        key = None if ask is None else (caller.client, ask)
        self._open[number] = Open(caller.request, caller.now, key)
        if key is not None:
            self._asks[key] = number
        return number

    # Replies, without the lock

    def _carry_out(self, commands: list[Addressed], now: float) -> None:
        for name, command in commands:
            if isinstance(command, Recall):
                self._recall(name, command.consumer)
                continue
            if isinstance(command, Buried):
                log_buried(name, command)
                continue
            if isinstance(command, Left):
                self._let_go(command)
                continue
            if isinstance(command, Released):
                log_released(name, command)
                continue
            entry = self._open.pop(command.request, None)
            if entry is None:
                continue  # the server was closed meanwhile, and said so
            if entry.ask is not None:
                self._asks.pop(entry.ask, None)
            entry.request.reply(self._reply(name, command, now - entry.since))

    def _reply(self, name: str, command: object, waited_s: float) -> Reply:
        if isinstance(command, Delivered):
            return (OK, command.first_tag, wires(command.runs), command.held)
        if isinstance(command, Accepted):
            return (OK, command.room_items, command.room_bytes, command.held)
        if isinstance(command, Refused):
            counts = (command.accepted, command.lost, waited_s)
            if command.reason is Refusal.NO_SPACE:
                return (REFUSED, command.reason.value, counts, self._full)
            with self._lock:
                queue = self._hub.get(name)
                state = in_words(queue.statistics(time.monotonic()), queue.config)
            return (REFUSED, command.reason.value, counts, state)
        return (OK, command.lost)  # type: ignore[attr-defined]

    def _let_go(self, left: Left) -> None:
        """Tell producers whose items stayed on their accelerators."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for claim in claims(left.runs):
            found.setdefault(claim[:3], []).append(claim.number)
        for (worker, epoch, client), numbers in found.items():
            call = ("left", client, epoch, tuple(numbers))
            with suppress(CommError):  # who is gone keeps nothing either
                self._endpoint.call(CLIENT_SERVICE, call, to=worker, timeout=self._config.lease_s)

    def _recall(self, name: str, consumer: ClientId) -> None:
        call = ("recall", consumer.number)
        reply: Handle[tuple[int, ...]] = self._endpoint.call(
            CLIENT_SERVICE, call, to=consumer.worker, timeout=self._config.lease_s
        )

        def come(done: Handle[tuple[int, ...]]) -> None:
            tags = () if done.exception() is not None else done.result(0.0)
            now = time.monotonic()
            recalled = Recalled(consumer, tags)
            self._carry_out(self._unasked(lambda: self._hub.step(name, recalled, now)), now)

        reply.add_done_callback(come)


def _deadline(caller: _Caller, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else caller.now + timeout_s

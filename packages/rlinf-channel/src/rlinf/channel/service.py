"""The server's side of every channel: requests to events, commands to replies."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from rlinf.channel.batching import Crate, collect, shelve
from rlinf.channel.config import ChannelConfig
from rlinf.channel.errors import ChannelError, ServerLost
from rlinf.channel.hub import Addressed, Hub
from rlinf.channel.link import OK, REFUSED, Reply, describe
from rlinf.channel.messages import (
    Accepted,
    Attach,
    Cancel,
    ClientId,
    Close,
    Commit,
    Delivered,
    Event,
    Outcome,
    Put,
    Recall,
    Recalled,
    Refused,
    Released,
    Renew,
    Settle,
    Take,
)
from rlinf.channel.session import CLIENT_SERVICE
from rlinf.channel.statistics import MOST_LISTED, ChannelStatistics, Waiting
from rlinf.channel.tags import Ranges, expand
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.handle import Handle
from rlinf.comm.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that is not answered yet."""

    request: Request
    since: float
    ask: tuple[ClientId, int] | None = None


@dataclass(frozen=True, slots=True)
class _Caller:
    """One request while it is turned into events."""

    request: Request
    client: ClientId
    channel: str
    now: float


class ChannelService:
    """Every channel of one server. Runs on whichever thread brings a request; never waits."""

    def __init__(self, endpoint: Endpoint, config: ChannelConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._hub = Hub(str(endpoint.id))
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._asks: dict[tuple[ClientId, int], int] = {}
        self._operations: dict[str, Callable[..., list[Addressed]]] = {
            "cancel": self._cancel,
            "close": self._close,
            "commit": self._commit,
            "connect": self._connect,
            "create": self._create,
            "delete": self._delete,
            "put": self._put,
            "qsize": self._qsize,
            "recalled": self._recalled,
            "renew": self._renew,
            "settle": self._settle,
            "statistics": self._statistics,
            "take": self._take,
        }

    def handle(self, request: Request) -> float:
        """Carry one request out; when the clock should be looked at next."""
        now = time.monotonic()
        operation, channel, number, *fields = request.payload
        client = ClientId(str(request.source), request.epoch, number)
        caller = _Caller(request, client, channel, now)
        try:
            with self._lock:
                commands = self._operations[operation](caller, *fields)
        except ChannelError as error:
            request.reply(describe(error))
            return self._hub.wake_at
        self._carry_out(commands, now)
        return self._hub.wake_at

    def gone(self, worker: str, epoch: int) -> None:
        """An incarnation of a worker is lost."""
        now = time.monotonic()
        with self._lock:
            commands = self._hub.gone(worker, epoch, now)
        self._carry_out(commands, now)

    def tick(self, now: float) -> float:
        """Do what is due; when something is due next."""
        with self._lock:
            commands = self._hub.tick(now)
        self._carry_out(commands, now)
        return self._hub.wake_at

    def statistics(self) -> tuple[ChannelStatistics, ...]:
        """Every channel."""
        now = time.monotonic()
        with self._lock:
            pictures = [queue.statistics(now) for queue in self._hub]
        waiting = self._waiting(now)
        return tuple(replace(one, waiting=waiting.get(one.name, ())) for one in pictures)

    def close(self) -> None:
        """Tell everybody who waits that the server ends."""
        with self._lock:
            left, self._open = self._open, {}
        for entry in left.values():
            server = str(self._endpoint.id)
            channel = entry.request.payload[1]
            entry.request.reply(describe(ServerLost(channel, server, "wait", "it was closed")))

    # Requests, under the lock

    def _create(
        self, caller: _Caller, config: dict[str, object] | None, capacity: float
    ) -> list[Addressed]:
        wanted = self._config if config is None else ChannelConfig.from_dict(config)
        self._hub.create(caller.channel, wanted)
        return self._connect(caller, capacity)

    def _connect(self, caller: _Caller, capacity: float) -> list[Addressed]:
        queue = self._hub.get(caller.channel)
        caller.request.reply((OK, asdict(queue.config)))
        if capacity == 1.0:
            return []
        return self._step(caller, Attach(caller.client, capacity))

    def _delete(self, caller: _Caller) -> list[Addressed]:
        self._hub.delete(caller.channel)
        caller.request.reply((OK,))
        return []

    def _qsize(self, caller: _Caller) -> list[Addressed]:
        caller.request.reply((OK, len(self._hub.get(caller.channel))))
        return []

    def _statistics(self, caller: _Caller) -> list[Addressed]:
        picture = self._hub.get(caller.channel).statistics(caller.now)
        waiting = self._waiting(caller.now).get(caller.channel, ())
        caller.request.reply((OK, replace(picture, waiting=waiting)))
        return []

    def _close(self, caller: _Caller) -> list[Addressed]:
        self._hub.get(caller.channel)
        return self._step(caller, Close(self._ticket(caller)))

    def _put(
        self, caller: _Caller, first: int, wire: tuple[object, ...], timeout_s: float | None
    ) -> list[Addressed]:
        self._hub.get(caller.channel)
        items = shelve(Crate(*wire), caller.channel)  # type: ignore[arg-type]
        put = Put(self._ticket(caller), caller.client, first, items, _deadline(caller, timeout_s))
        return self._step(caller, put)

    def _take(
        self,
        caller: _Caller,
        ask: tuple[int, Ranges],
        wish: tuple[object, ...],
        timeout_s: float | None,
    ) -> list[Addressed]:
        self._hub.get(caller.channel)
        number, done = ask
        max_items, target_weight, full, key, wait, along = wish
        take = Take(
            self._ticket(caller, number),
            caller.client,
            max_items,  # type: ignore[arg-type]
            target_weight,  # type: ignore[arg-type]
            bool(full),
            key,  # type: ignore[arg-type]
            _deadline(caller, timeout_s),
            bool(wait),
            expand(done),
            along,  # type: ignore[arg-type]
        )
        return self._step(caller, take)

    def _settle(self, caller: _Caller, tags: Ranges, outcome: str) -> list[Addressed]:
        self._hub.get(caller.channel)
        settle = Settle(self._ticket(caller), caller.client, expand(tags), Outcome(outcome))
        return self._step(caller, settle)

    def _recalled(self, caller: _Caller, tags: Ranges) -> list[Addressed]:
        caller.request.reply((OK,))
        return self._step(caller, Recalled(caller.client, expand(tags)))

    def _renew(self, caller: _Caller, held: Ranges, done: Ranges) -> list[Addressed]:
        self._hub.get(caller.channel)
        commands = self._step(caller, Settle(None, caller.client, expand(done))) if done else []
        return commands + self._step(
            caller, Renew(self._ticket(caller), caller.client, expand(held))
        )

    def _cancel(self, caller: _Caller, ask: int) -> list[Addressed]:
        caller.request.reply((OK,))
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
        put = Put(
            self._ticket(caller),
            producer,
            first,
            shelve(Crate(*wire), name),  # type: ignore[arg-type]
            _deadline(caller, timeout_s),
            atomic=True,
        )
        commit = Commit(caller.channel, name, caller.client, expand(tags), put)
        return self._hub.commit(commit, caller.now)

    def _step(self, caller: _Caller, event: Event) -> list[Addressed]:
        return self._hub.step(caller.channel, event, caller.now)

    def _ticket(self, caller: _Caller, ask: int | None = None) -> int:
        number = next(self._numbers)
        key = None if ask is None else (caller.client, ask)
        self._open[number] = _Open(caller.request, caller.now, key)
        if key is not None:
            self._asks[key] = number
        return number

    # Replies, without the lock

    def _carry_out(self, commands: list[Addressed], now: float) -> None:
        for name, command in commands:
            if isinstance(command, Recall):
                self._recall(name, command.consumer)
                continue
            if isinstance(command, Released):
                log.info(
                    "channel %s: %d item(s) of %s are back in the queue: %s",
                    name,
                    len(command.tags),
                    command.consumer,
                    "its lease ran out" if command.expired else "it is gone",
                )
                continue
            entry = self._open.pop(command.request, None)
            if entry is None:
                continue  # the server was closed meanwhile, and said so
            if entry.ask is not None:
                self._asks.pop(entry.ask, None)
            entry.request.reply(self._reply(name, command, now - entry.since))

    def _reply(self, name: str, command: object, waited_s: float) -> Reply:
        if isinstance(command, Delivered):
            return (OK, command.first_tag, tuple(collect(command.items)))
        if isinstance(command, Accepted):
            return (OK, command.room_items, command.room_bytes)
        if isinstance(command, Refused):
            counts = (command.accepted, command.lost, waited_s)
            return (REFUSED, command.reason.value, counts, self._state(name))
        return (OK, command.lost)  # type: ignore[attr-defined]

    def _state(self, name: str) -> str:
        """The channel in words, for whoever is told no."""
        with self._lock:
            queue = self._hub.get(name)
            state = queue.statistics(time.monotonic())
        bound = queue.config.max_items
        words = [
            f"{state.depth}{f' of {bound}' if bound else ''} item(s) queued",
            f"{state.held_bytes} of {queue.config.buffer_bytes} bytes held",
        ]
        held = [f"{c.leased_items} by {c.id}" for c in state.consumers if c.leased_items]
        if held:
            words.append(f"leased: {', '.join(held)}")
        words.append(f"{state.waiting_consumers} consumer(s) wait")
        return ", ".join(words)

    def _waiting(self, now: float) -> dict[str, tuple[Waiting, ...]]:
        """Whose requests are not answered yet, by channel, the longest first."""
        found: dict[str, list[Waiting]] = {}
        for entry in list(self._open.values()):  # another thread may be answering some
            operation, channel, number, *fields = entry.request.payload
            where = fields[1][0] if operation == "commit" else channel
            who = f"{entry.request.source}#{number}"
            found.setdefault(where, []).append(Waiting(who, operation, now - entry.since))
        return {name: tuple(who[:MOST_LISTED]) for name, who in found.items()}

    def _recall(self, name: str, consumer: ClientId) -> None:
        call = ("recall", consumer.number)
        reply: Handle[tuple[int, ...]] = self._endpoint.call(
            CLIENT_SERVICE, call, to=consumer.worker, timeout=self._config.lease_s
        )

        def come(done: Handle[tuple[int, ...]]) -> None:
            tags = () if done.exception() is not None else done.result(0.0)
            now = time.monotonic()
            with self._lock:
                commands = self._hub.step(name, Recalled(consumer, tags), now)
            self._carry_out(commands, now)

        reply.add_done_callback(come)


def _deadline(caller: _Caller, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else caller.now + timeout_s

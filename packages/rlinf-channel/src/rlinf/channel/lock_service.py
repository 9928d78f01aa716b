"""The server's side of the device lock: requests to events, commands to replies."""

import itertools
import logging
import time
from collections.abc import Callable

from rlinf.channel.archive import Archive
from rlinf.channel.errors import LockTimeout, ServerLost, SpoolFailed
from rlinf.channel.journal import Record
from rlinf.channel.link import OK, Reply, describe
from rlinf.channel.lock_core import (
    Acquire,
    Denied,
    Ended,
    Granted,
    Keep,
    LockCommand,
    LockCore,
    LockEvent,
    Release,
    Vacate,
    Vacated,
)
from rlinf.channel.messages import Cancel, ClientId, Gone, Settled, Tick
from rlinf.channel.session import CLIENT_SERVICE
from rlinf.channel.statistics import LockStatistics
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.handle import Handle
from rlinf.comm.request import Request

log = logging.getLogger(__name__)


class LockService:
    """The device lock of one server. Runs on whichever thread brings a request; waits for nothing
    but, where there is a spool, for its disk.

    Args:
        endpoint: Where requests come from.
        lease_s: Of each grant.
        archive: Where grants are kept.
        due: Told when the clock should be looked at, where no request has moved that.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        lease_s: float,
        archive: Archive,
        due: Callable[[float], None],
    ) -> None:
        self._endpoint = endpoint
        self._due = due
        self._server = str(endpoint.id)
        self._archive = archive
        self._journal: list[Record] | None = [] if archive.durable else None
        self._core = LockCore(lease_s, first_token=endpoint.epoch, journal=self._journal)
        self._core.load(archive.found.grants.values(), time.monotonic())
        archive.savers.append(lambda state: state.grants.update(self._core.save()))
        self._lease_s = lease_s
        self._lock = archive.lock
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Request, Acquire | None, float]] = {}

    def handle(self, request: Request) -> float:
        """Carry one request out; when the clock should be looked at next."""
        now = time.monotonic()
        operation, _, number, *fields = request.payload
        client = ClientId(str(request.source), request.epoch, number)
        if operation == "statistics":
            request.reply((OK, self.statistics()))
        elif operation == "acquire":
            devices, order, timeout_s, *size = fields
            deadline = None if timeout_s is None else now + timeout_s
            ticket = next(self._numbers)
            acquire = Acquire(ticket, client, frozenset(devices), tuple(order), deadline, *size)
            self._open[ticket] = (request, acquire, now)
            self._step(acquire, now)
        elif operation == "cancel":
            request.reply((OK,))
            self._cancel(client, now)
        else:
            ticket = next(self._numbers)
            self._open[ticket] = (request, None, now)
            held = operation == "keep"
            self._step(Keep(ticket, *fields) if held else Release(ticket, *fields), now)
        return self._core.wake_at

    def gone(self, worker: str, epoch: int) -> None:
        """An incarnation of a worker is lost: its grants end."""
        self._step(Gone(worker, epoch), time.monotonic())

    def tick(self, now: float) -> float:
        """Do what is due; when something is due next."""
        if self._core.wake_at <= now:
            self._step(Tick(), now)
        return self._core.wake_at

    def statistics(self) -> LockStatistics:
        """Who holds what and who waits."""
        with self._lock:
            return self._core.statistics(time.monotonic())

    def close(self) -> None:
        """Tell everybody who waits that the server ends."""
        with self._lock:
            left, self._open = self._open, {}
        for request, _, _ in left.values():
            error = ServerLost("device lock", self._server, "acquire", "it was closed")
            request.reply(describe(error))

    def _cancel(self, client: ClientId, now: float) -> None:
        """A client waits for one grant at a time: withdraw what it waits for."""
        waiting = [n for n, (_, a, _) in list(self._open.items()) if a and a.client == client]
        for ticket in waiting:
            self._step(Cancel(ticket), now)

    def _step(self, event: LockEvent, now: float) -> None:
        with self._lock:
            try:
                self._archive.check()
                commands = self._core.step(event, now)
                if self._journal:
                    self._archive.keep(self._journal)
                    self._journal.clear()
            except SpoolFailed as error:
                left, self._open = self._open, {}
                for request, _, _ in left.values():
                    request.reply(describe(error))
                return
        for command in commands:
            if isinstance(command, Ended):
                why = "its lease ran out" if command.expired else "it is gone"
                log.info("device lock: grant %d of %s ends: %s", command.token, command.client, why)
                continue
            if isinstance(command, Vacate):
                self._vacate(command)
                continue
            entry = self._open.pop(command.request, None)
            if entry is not None:
                entry[0].reply(self._reply(command, entry[1], now - entry[2]))

    def _vacate(self, vacate: Vacate) -> None:
        """Have somebody leave. One that is silent for a lease is as good as gone."""

        def left(_: object = None) -> None:
            self._step(Vacated(vacate.token), time.monotonic())
            self._due(self._core.wake_at)

        client = vacate.client
        call = ("leave", client.number, vacate.token)
        try:
            reply: Handle[None] = self._endpoint.call(
                CLIENT_SERVICE, call, to=client.worker, timeout=self._lease_s
            )
        except CommError:
            left()
        else:
            reply.add_done_callback(left)

    def _reply(self, command: LockCommand, acquire: Acquire | None, waited_s: float) -> Reply:
        if isinstance(command, Granted):
            return (OK, command.token, self._lease_s)
        if isinstance(command, Settled):
            return (OK, command.lost)
        assert acquire is not None
        holders = ahead = ""
        if isinstance(command, Denied):
            holders, ahead = ("; ".join(map(str, who)) for who in (command.holders, command.ahead))
        return describe(LockTimeout(sorted(acquire.devices), waited_s, holders, ahead))

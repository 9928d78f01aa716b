"""One client's line to one channel on its server: requests out, replies or our errors back."""

import threading
import time
from dataclasses import dataclass

from rlinf.channel import errors
from rlinf.channel.bond import Bond
from rlinf.channel.config import ChannelConfig
from rlinf.channel.errors import (
    ChannelClosed,
    ChannelError,
    Full,
    LeaseLost,
    ServerLost,
    SpoolFull,
    Standstill,
    Timeout,
)
from rlinf.channel.messages import Refusal
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.handle import Default, Handle, TimeoutLike

SERVICE = "channel"
MONITOR_SERVICE = "channel-monitor"
GRACE_S = 1.0
"""The server answers at the deadline; a client waits this much longer for that answer."""

OK, REFUSED, REPLACED, ERROR = "ok", "refused", "replaced", "error"

Reply = tuple[object, ...]

LOST = (ConnectionError, LookupError, CommTimeout)
"""Errors of a call that say that the server does not answer."""


class ServerAway(ServerLost):
    """The server was lost and is being looked for: raised inside only, never to the user."""


@dataclass(frozen=True, slots=True)
class Link:
    """Where a channel is and who is asking. Sends requests; knows what replies mean."""

    endpoint: Endpoint
    server: str
    channel: str
    number: int
    config: ChannelConfig
    bond: Bond

    @property
    def me(self) -> str:
        """This client in messages."""
        return f"{self.endpoint.id}#{self.number}"

    def call(self, operation: str, *fields: object) -> Handle[Reply]:
        """Send a request to the channel; what it carries may be changed when this returns."""
        return self.call_of(self.bond.incarnation, operation, *fields)

    def call_of(self, incarnation: int, operation: str, *fields: object) -> Handle[Reply]:
        """The same, to this incarnation of the server only."""
        place = self.channel, self.number, incarnation
        return send(self.endpoint, self.server, operation, *place, *fields)

    def ask(self, operation: str, *fields: object, timeout: TimeoutLike) -> Reply:
        """Send a request and wait for its reply. A server that dies and comes back meanwhile is
        asked again, so it must do no harm to carry the request out twice.

        Raises:
            Timeout: The server did not answer within `timeout`.
            ServerLost: It is gone.
            ChannelError: It refused.
        """
        deadline = self.deadline(timeout)
        while True:
            self.bond.wait(deadline, operation)
            reply = self.call(operation, *fields)
            try:
                return self.result(reply, operation, self.remaining(deadline))
            except ServerAway:
                continue

    def result(self, handle: Handle[Reply], operation: str, timeout: TimeoutLike) -> Reply:
        """Wait for a reply and return its fields, or raise what it says.

        Raises:
            Timeout: The server itself did not answer within `timeout`.
            ServerLost: It is gone.
            ChannelError: It refused.
        """
        self.wait(handle, operation, timeout)
        return self.read(handle, operation)

    def wait(self, handle: Handle[Reply], operation: str, timeout: TimeoutLike) -> None:
        """Wait for a reply. Raises `Timeout` where the server is silent for so long."""
        try:
            handle.wait(timeout)
        except CommTimeout as error:
            limit = self.seconds(timeout) or 0.0
            raise Timeout(self.channel, operation, limit, f"{self.server} is silent") from error

    def read(self, handle: Handle[Reply], operation: str) -> Reply:
        """The fields of a reply that has come, or the error it says.

        Raises:
            ServerAway: The server was lost, and may come back: wait for the bond, and ask again.
        """
        problem = handle.exception()
        if problem is None:
            status, *fields = handle.result(0.0)
            if status != REPLACED:
                return read(handle, self.channel, self.server, operation, self.me)
            if fields[0] != self.bond.incarnation:
                self.bond.broken(self.bond.incarnation, "another one runs under its name")
        elif isinstance(problem, LOST):
            epoch = getattr(problem, "epoch", None)
            self.bond.broken(epoch or self.bond.incarnation, str(problem))
        else:
            raise problem
        error = self.bond.error(operation)
        if self.bond.gone_for_good:
            raise error
        raise ServerAway(*error.values)  # type: ignore[arg-type]

    def answered(self, handle: Handle[Reply]) -> bool:
        """Whether a reply that has come is of the server it was sent to, and so `read` will not
        tell the bond anything.
        """
        return handle.exception() is None and handle.result(0.0)[0] != REPLACED

    def seconds(self, timeout: TimeoutLike) -> float | None:
        """What a timeout means here."""
        if isinstance(timeout, Default):
            return self.endpoint.config.connection_timeout_s
        return timeout

    def remaining(self, deadline: float | None) -> float | None:
        """Seconds until a deadline of `time.monotonic()`; None: for ever."""
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def deadline(self, timeout: TimeoutLike) -> float | None:
        """The moment at which a timeout that begins now ends."""
        limit = self.seconds(timeout)
        return None if limit is None else time.monotonic() + limit


def send(endpoint: Endpoint, server: str, operation: str, *fields: object) -> Handle[Reply]:
    """Send one request to a channel server. A server that cannot be reached fails the handle."""
    try:
        return endpoint.call(SERVICE, (operation, *fields), to=server, timeout=None)
    except CommError as error:
        failed: Handle[Reply] = Handle(f"{operation} to {server}")
        failed.set_error(error)
        return failed


def ask(endpoint: Endpoint, server: str, operation: str, channel: str, *fields: object) -> Reply:
    """One request and its reply, for those that have no `Link`."""
    handle = send(endpoint, server, operation, channel, *fields)
    return answered(endpoint, handle, server, operation, channel)


def answered(
    endpoint: Endpoint, handle: Handle[Reply], server: str, operation: str, channel: str
) -> Reply:
    """Wait for the reply to a request of those that have no `Link`."""
    try:
        handle.wait(endpoint.config.connection_timeout_s)
    except CommTimeout as error:
        raise ServerLost(channel, server, operation, "it does not answer") from error
    return read(handle, channel, server, operation, str(endpoint.id))


def read(handle: Handle[Reply], channel: str, server: str, operation: str, me: str) -> Reply:
    """The fields of a reply that has come, or the error it says."""
    problem = handle.exception()
    if isinstance(problem, LOST):
        raise ServerLost(channel, server, operation, str(problem)) from problem
    if problem is not None:
        raise problem
    status, *fields = handle.result(0.0)
    if status == OK:
        return tuple(fields)
    if status == REFUSED:
        raise _refusal(channel, operation, me, *fields)  # type: ignore[arg-type]
    name, values = fields
    raise rebuild(str(name), values)


def _refusal(
    channel: str, operation: str, me: str, reason: str, counts: tuple[int, int, float], state: str
) -> ChannelError:
    accepted, lost, waited_s = counts
    match Refusal(reason):
        case Refusal.CLOSED:
            return ChannelClosed(channel, operation)
        case Refusal.FULL:
            return Full(channel, state, accepted)
        case Refusal.STANDSTILL:
            return Standstill(channel, state, accepted)
        case Refusal.TIMEOUT:
            return Timeout(channel, operation, waited_s, state)
        case Refusal.LEASE_LOST:
            return LeaseLost(channel, me, lost)
        case Refusal.NO_SPACE:
            return SpoolFull(channel, state, lost)
        case Refusal.CANCELLED:
            return ChannelError(f"{operation} on channel '{channel}' was cancelled by {me}")


def rebuild(name: str, values: object) -> ChannelError:
    """An error of this package from its class name and what its constructor was given."""
    kind = getattr(errors, name, ChannelError)
    arguments = values if isinstance(values, tuple) else (str(values),)
    error: ChannelError = kind(*arguments)
    return error


def describe(error: ChannelError) -> tuple[str, str, tuple[object, ...]]:
    """The reply that carries an error."""
    return ERROR, type(error).__name__, error.values or (str(error),)


class Through:
    """Lets whoever waits for an item read the sockets meanwhile, by waiting for the reply, and for
    that of the next server where the one asked has died.
    """

    def __init__(self, reply: Handle[Reply]) -> None:
        self._reply = reply
        self._changed = threading.Condition()

    def follow(self, reply: Handle[Reply]) -> None:
        """It is this reply now that completes the handle."""
        with self._changed:
            self._reply = reply
            self._changed.notify_all()

    def completed(self) -> None:
        """To be called when the handle is done."""
        with self._changed:
            self._changed.notify_all()

    def drive(self, handle: Handle[object], deadline: float | None) -> None:
        """Wait until the handle is done, which a callback of the reply does."""
        while not handle.done():
            reply = self._reply
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                reply.wait(left)
            except CommTimeout:
                return
            with self._changed:
                while not handle.done() and self._reply is reply:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return
                    self._changed.wait(left)

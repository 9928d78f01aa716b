"""DeviceLock: the right to use a set of devices, all of them or none, in the order of the flow."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rlinf.channel.config import parse_bytes
from rlinf.channel.errors import (
    ChannelError,
    InvalidConfig,
    LeaseLost,
    LockTimeout,
    ServerLost,
    Timeout,
)
from rlinf.channel.link import GRACE_S, Reply, read
from rlinf.channel.session import session_of
from rlinf.channel.statistics import LockStatistics
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.events import Lost
from rlinf.comm.handle import DEFAULT, Default, Handle, TimeoutLike

LOCK_SERVICE = "device-lock"
RETRY_S = 0.1
"""Between two looks for a server that died."""
NAME = "device lock"


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices are yours while the `with` block lasts."""

    token: int
    """Fencing token: larger than that of every grant before. Show it to whatever the devices
    guard, and let that refuse a smaller one."""
    devices: frozenset[str]


class Residency(Protocol):
    """What can leave its devices and come back unchanged: a model with its optimiser, say."""

    def onload(self) -> None:
        """Bring everything onto the devices."""
        ...

    def offload(self) -> None:
        """Free the devices. May come on another thread than `onload`, never beside it."""
        ...

    def resident_bytes(self) -> int:
        """Bytes on each of the devices now."""
        ...


class DeviceLock:
    """Takes turns on a set of devices with every other worker that asks the same server.

    All devices are granted together, so a cycle of waiters cannot form. Of waiters which want a
    common device the lowest order goes first. A grant ends with its holder's process, or when
    the holder is silent for the server's `lease_s` (a living one renews by itself).

    Args:
        endpoint: Whose worker asks.
        devices: Names such as ``"core:0"``; only equality counts.
        server: The worker that hosts the `ChannelServer`.
        residency: Is brought onto the devices at the beginning of each block and leaves them at
            its end.
        room_bytes: What there is on each device, such as ``"80GB"``. With it the residency stays
            where it is at the end of a block, and leaves when somebody is next who does not fit
            beside it (one without a residency never does): those who fit together do not swap.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        devices: Iterable[str],
        *,
        server: str = "channel/0",
        residency: Residency | None = None,
        room_bytes: int | str = 0,
    ) -> None:
        self.devices = frozenset(devices)
        if not self.devices or isinstance(devices, str):
            raise InvalidConfig(f"a device lock needs a set of device names, not {devices!r}")
        self.server = server
        self.lease_s = 30.0
        self._endpoint = endpoint
        self._session = session_of(endpoint)
        self._number = self._session.number()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._token: int | None = None
        self._residency = residency
        self._room = parse_bytes(room_bytes)
        self._needs = 0
        """The most that the residency was seen to have; 0: not known yet."""
        self._moving = threading.Lock()
        self._stays: int | None = None
        """The grant since whose end the residency is on the devices without one."""
        self._session.add(self._number, self)

    @contextmanager
    def hold(self, order: tuple[int, ...], timeout: TimeoutLike = DEFAULT) -> Iterator[Grant]:
        """Hold all the devices for the length of the block.

        Args:
            order: (iteration, stage position): lower goes first among waiters.
            timeout: Seconds to wait for the grant; None: for ever.

        Raises:
            LockTimeout: Others hold the devices still; says who, and who is before us.
            LeaseLost: At the end of the block: the grant had ended meanwhile, so another worker
                may have used the devices at the same time.
            ServerLost: The server is gone.
        """
        default = isinstance(timeout, Default)
        limit = self._endpoint.config.connection_timeout_s if default else timeout
        assert not isinstance(limit, Default)
        started = time.monotonic()
        if not self._turn.acquire(timeout=-1 if limit is None else limit):
            raise LockTimeout(sorted(self.devices), limit or 0.0, "another thread by this object")
        try:
            left = None if limit is None else max(0.0, started + limit - time.monotonic())
            grant = self._acquire(order, left)
            stays = 0
            try:
                self._enter()
                yield grant
                stays = self._nbytes()
            finally:
                lost = self._release(grant.token, stays)
            if lost:
                raise LeaseLost(NAME, str(self._endpoint.id), 1)
        finally:
            self._turn.release()

    def statistics(self, timeout: TimeoutLike = DEFAULT) -> LockStatistics:
        """Who holds which devices of this server and who waits, in their order."""
        (state,) = self._result(self._call("statistics"), "statistics", timeout)
        assert isinstance(state, LockStatistics)
        return state

    def _enter(self) -> None:
        with self._moving:
            there = self._moved()
            if self._residency is not None and not there:
                self._residency.onload()

    def _moved(self) -> bool:
        """It does not stay any more; whether it did. Under `_moving`."""
        there, self._stays = self._stays is not None, None
        self._session.staying.pop(self._number, None)
        return there

    def _nbytes(self) -> int:
        """What may stay on the devices, or 0."""
        if self._residency is None or not self._room:
            return 0
        nbytes = self._residency.resident_bytes()
        self._needs = max(self._needs, nbytes)
        return nbytes if nbytes <= self._room else 0

    def _release(self, token: int, stays: int) -> bool:
        """Leave the devices or say how much stays there; whether the grant had ended before."""
        with self._lock:
            self._token = None
        self._stays = token
        self._session.staying[self._number] = self.leave
        try:
            if not stays:
                self.leave(token)
        finally:
            lost = self._ask("release", token, stays)
        if lost:
            self.leave(token)  # nobody would ask it to
        return lost

    def _acquire(self, order: tuple[int, ...], limit: float | None) -> Grant:
        def acquire(left: float | None) -> Reply:
            size = self._needs, self._room
            reply = self._call("acquire", sorted(self.devices), tuple(order), left, *size)
            try:
                return self._result(reply, "acquire", None if left is None else left + GRACE_S)
            except BaseException:
                reply.add_done_callback(self._give_back)
                self._call("cancel")
                raise

        token, lease_s = self._persist(acquire, limit)
        assert isinstance(token, int) and isinstance(lease_s, float)
        self.lease_s = lease_s
        with self._lock:
            self._token = token
        self._session.add(self._number, self)
        self._session.hold()
        return Grant(token, self.devices)

    def _give_back(self, reply: Handle[Reply]) -> None:
        """A grant which comes when nobody waits for it any more."""
        if reply.exception() is None:
            status, *fields = reply.result(0.0)
            if status == "ok":
                self._call("release", fields[0], None)

    # What the session asks

    def renew(self) -> bool:
        """Tell the server that the holder lives; whether anything is held."""
        with self._lock:
            token = self._token
        if token is not None:
            self._call("keep", token)
        return token is not None

    def recalled(self) -> tuple[int, ...]:
        """A lock holds no items."""
        return ()

    def leave(self, token: int) -> None:
        """Leave the devices, if it is since the end of this grant that the residency stays."""
        with self._moving:
            if self._stays == token:
                self._moved()
                if self._residency is not None:
                    self._residency.offload()

    def server_lost(self, lost: Lost) -> None:
        """One that was closed is not waited for; one that died may come back, and does not know
        who stays.
        """
        if lost.clean:
            self._closed.set()
        if (token := self._stays) is not None and self._room:
            threading.Thread(target=self.leave, args=(token,), daemon=True).start()

    def _call(self, operation: str, *fields: object) -> Handle[Reply]:
        try:
            return self._endpoint.call(
                LOCK_SERVICE, (operation, NAME, self._number, *fields), to=self.server, timeout=None
            )
        except CommError as error:
            failed: Handle[Reply] = Handle(f"{operation} of the device lock")
            failed.set_error(error)
            return failed

    def _result(self, reply: Handle[Reply], operation: str, timeout: TimeoutLike) -> Reply:
        try:
            reply.wait(timeout)
        except CommTimeout as error:
            raise Timeout(NAME, operation, 0.0, f"{self.server} is silent") from error
        return read(reply, NAME, self.server, operation, str(self._endpoint.id))

    def _ask(self, operation: str, *fields: object) -> bool:
        """Whether the server says that the grant had ended; True if it cannot say."""

        def ask(left: float | None) -> Reply:
            return self._result(self._call(operation, *fields), operation, left)

        try:
            (lost,) = self._persist(ask, self._endpoint.config.connection_timeout_s)
        except (ChannelError, CommError):
            return True
        return bool(lost)

    def _persist(self, act: Callable[[float | None], Reply], limit: float | None) -> Reply:
        """Act, with the seconds left, again while the server is away: at most for a lease."""
        now = time.monotonic()
        deadline = None if limit is None else now + limit
        until = now + min(self.lease_s, limit or self.lease_s)
        while True:
            try:
                return act(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except ServerLost:
                if time.monotonic() >= until or self._closed.wait(RETRY_S):
                    raise

"""RegistryServer and RegistryClient: the registry for workers of other processes.

The server is an endpoint, "registry/0", that serves "registry" over tcp; a client knows its
address and token and talks through the endpoint it is bound to. Both are the same `Registry`.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf.comm.address import Address, WorkerId
from rlinf.comm.config import CommConfig
from rlinf.comm.device import Device
from rlinf.comm.errors import (
    CommError,
    ConfigError,
    PeerLost,
    ProtocolError,
    Timeout,
    UnknownWorker,
)
from rlinf.comm.handle import Handle
from rlinf.comm.host import host_id, is_loopback
from rlinf.comm.registry import (
    Change,
    Joined,
    Left,
    MemoryRegistry,
    Registry,
    Watcher,
    WorkerRecord,
    unknown_worker,
)
from rlinf.comm.request import Request

if TYPE_CHECKING:
    from rlinf.comm.caller import Caller

log = logging.getLogger(__name__)

NAME = WorkerId("registry", 0)
SERVICE = "registry"
RETRY_S = 0.1
LOG_LENGTH = 10_000


def token_bytes(token: bytes | str) -> bytes:
    """A token as bytes; text is hexadecimal, as `RegistryServer.token.hex()` gives it."""
    if isinstance(token, bytes):
        return token
    try:
        return bytes.fromhex(token)
    except ValueError:
        raise ConfigError("a registry token given as text must be hexadecimal") from None


def to_plain(record: WorkerRecord) -> dict[str, object]:
    """A record as plain data."""
    return {
        "id": str(record.id),
        "epoch": record.epoch,
        "addresses": [str(address) for address in record.addresses],
        "host": record.host,
        "pid": record.pid,
        "device": [record.device.kind, record.device.index, record.device.uuid],
        "metadata": dict(record.metadata),
    }


def from_plain(data: dict[str, Any]) -> WorkerRecord:
    """The record that `to_plain` took apart."""
    return WorkerRecord(
        WorkerId.parse(data["id"]),
        data["epoch"],
        tuple(Address.parse(text) for text in data["addresses"]),
        data["host"],
        data["pid"],
        Device(*data["device"]),
        data["metadata"],
    )


class RegistryServer(MemoryRegistry):
    """A registry that others reach at `address`; also usable in its own process as it is.

    Args:
        host: Address to listen on; "0.0.0.0": all, and the routable one is told.
        port: 0: one the system chooses. A restarted server needs the same port.
        token: The secret; made up where None. A restarted server needs the same token.
        lease_s: How long a worker is believed in without a heartbeat.
        config: Further settings of its endpoint (TLS, for one).

    Attributes:
        address: What clients connect to, as text.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes | str | None = None,
        *,
        lease_s: float = 15.0,
        config: CommConfig | None = None,
    ) -> None:
        from rlinf.comm.endpoint import Endpoint

        secret = secrets.token_bytes(32) if token is None else token_bytes(token)
        super().__init__(secret, lease_s=lease_s)
        self._boot = secrets.token_hex(8)
        self._log: deque[tuple[int, Change]] = deque(maxlen=LOG_LENGTH)
        self._count = 0
        self._polls: list[Request] = []
        self._polls_lock = threading.Lock()
        self.host = host
        self.watch(self._changed)
        heartbeat_s = min(5.0, lease_s / 3)
        settings = replace(config or CommConfig(), host=host, port=port, heartbeat_s=heartbeat_s)
        self._endpoint = Endpoint(NAME, registry=self, config=settings)
        self._endpoint.serve(SERVICE, self._serve)
        address = next(a for a in self._endpoint.record.addresses if a.scheme in ("tcp", "tls"))
        self.address = str(address)

    def bind(self, caller: "Caller") -> Registry:
        """Used as it is; the server's own endpoint lends it the deadlines of its loop."""
        if caller.me == NAME:
            self._caller = caller
        return self

    def close(self) -> None:
        """Stop serving."""
        self._endpoint.close()

    def __enter__(self) -> "RegistryServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, request: Request) -> None:
        self.expire()
        _OPERATIONS[request.payload["op"]](self, request)

    def _serve_register(self, request: Request) -> None:
        record = from_plain(request.payload["record"])
        request.reply(to_plain(self.register(record).result(0.0)))

    def _serve_renew(self, request: Request) -> None:
        self.renew(from_plain(request.payload["record"])).result(0.0)
        request.reply()

    def _serve_unregister(self, request: Request) -> None:
        id = WorkerId.parse(request.payload["id"])
        self.unregister(id, request.payload["epoch"]).result(0.0)
        request.reply()

    def _serve_find(self, request: Request) -> None:
        id, timeout_s = WorkerId.parse(request.payload["id"]), request.payload["timeout_s"]
        found = self.find(id, timeout_s)

        def answer(handle: Handle[WorkerRecord]) -> None:
            error = handle.exception()
            if error is None:
                request.reply(to_plain(handle.result(0.0)))
            else:
                request.fail(error)

        if timeout_s is not None and not found.done():
            self._caller.patience.expire_with(found, timeout_s, lambda: self.unknown(id, timeout_s))
        found.add_done_callback(answer)

    def _serve_members(self, request: Request) -> None:
        request.reply([to_plain(record) for record in self.members(request.payload["group"])])

    def _serve_watch(self, request: Request) -> None:
        with self._polls_lock:
            if request.payload["boot"] == self._boot and request.payload["since"] == self._count:
                self._polls.append(request)
                return
        self._report(request)

    def _report(self, request: Request) -> None:
        since, oldest = request.payload["since"], self._log[0][0] if self._log else 0
        known = request.payload["boot"] == self._boot and since + 1 >= oldest
        answer: dict[str, object] = {"boot": self._boot, "count": self._count, "whole": not known}
        if known:
            answer["changes"] = [_change(c) for number, c in self._log if number > since]
        else:
            answer["records"] = [to_plain(record) for record in self.members()]
        request.reply(answer)

    def _changed(self, change: Change) -> None:
        with self._polls_lock:
            self._count += 1
            self._log.append((self._count, change))
            polls, self._polls = self._polls, []
        for request in polls:
            self._report(request)


_OPERATIONS: dict[str, Callable[[RegistryServer, Request], None]] = {
    "register": RegistryServer._serve_register,
    "renew": RegistryServer._serve_renew,
    "unregister": RegistryServer._serve_unregister,
    "find": RegistryServer._serve_find,
    "members": RegistryServer._serve_members,
    "watch": RegistryServer._serve_watch,
}


def _change(change: Change) -> dict[str, object]:
    joined = isinstance(change, Joined)
    expired = isinstance(change, Left) and change.expired
    return {"joined": joined, "expired": expired, "record": to_plain(change.record)}


class RegistryClient(Registry):
    """A registry served by another process. Give it to endpoints; each talks through its own.

    Operations are tried again, until their deadline, while the server is being restarted.

    Args:
        address: `RegistryServer.address`.
        token: `RegistryServer.token`, as bytes or hexadecimal text.
    """

    def __init__(self, address: str, token: bytes | str, *, caller: "Caller | None" = None) -> None:
        self.address = address
        self.token = token_bytes(token)
        place = Address.parse(address)
        self.host = place.host
        # Of another address only the server knows which host has it.
        here = host_id() if is_loopback(place.host) else ""
        self._record = WorkerRecord(NAME, 0, (place,), here)
        self._caller = caller
        self._cache: dict[WorkerId, WorkerRecord] = {}
        self._watchers: list[Watcher] = []
        self._seen: dict[WorkerId, WorkerRecord] = {}
        self._polled: dict[str, object] | None = None

    def bind(self, caller: "Caller") -> "RegistryClient":
        """A client that talks through this endpoint."""
        return RegistryClient(self.address, self.token, caller=caller)

    def register(self, record: WorkerRecord) -> Handle[WorkerRecord]:
        """One message, whatever the number of workers."""
        return self._ask({"op": "register", "record": to_plain(record)}, from_plain)

    def renew(self, record: WorkerRecord) -> Handle[None]:
        """Carries the whole record, which is what refills a restarted server."""
        return self._ask({"op": "renew", "record": to_plain(record)}, lambda _: None)

    def unregister(self, id: WorkerId, epoch: int) -> Handle[None]:
        """Tried once: a server that is away forgets by itself."""
        return self._ask({"op": "unregister", "id": str(id), "epoch": epoch}, lambda _: None)

    def find(
        self, id: WorkerId, timeout_s: float | None, *, fresh: bool = False
    ) -> Handle[WorkerRecord]:
        """Asks the server for what is not known yet; the server answers once it is."""
        known = self._record if id == NAME else None if fresh else self._cache.get(id)
        if known is not None:
            handle: Handle[WorkerRecord] = Handle("find")
            handle.set_result(known)
            return handle

        def keep(data: dict[str, Any]) -> WorkerRecord:
            record = self._cache[id] = from_plain(data)
            return record

        return self._ask({"op": "find", "id": str(id), "timeout_s": timeout_s}, keep, timeout_s)

    def members(self, group: str | None = None) -> tuple[WorkerRecord, ...]:
        """Asks the server."""
        asked: dict[str, object] = {"op": "members", "group": group}
        found = self._ask(asked, lambda rows: tuple(map(from_plain, rows)))
        records: tuple[WorkerRecord, ...] = found.result()
        return records

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Changes are told on the dispatching thread; they may be late, and be merged."""
        self._watchers.append(watcher)
        if self._polled is None:
            self._polled = {"op": "watch", "boot": "", "since": 0}
            self._poll()
        return lambda: self._watchers.remove(watcher)

    def unknown(self, id: WorkerId, timeout_s: float | None) -> UnknownWorker:
        """Names the nearest this client has heard of."""
        return unknown_worker(id, timeout_s, [NAME, *self._cache])

    def _through(self) -> "Caller":
        if self._caller is None:
            raise ConfigError(
                "a RegistryClient talks through an endpoint: "
                "Endpoint(id, registry=client), then use that endpoint"
            )
        return self._caller

    def _ask(
        self,
        payload: dict[str, object],
        read: Callable[[Any], Any],
        timeout_s: float | None = None,
    ) -> Handle[Any]:
        caller = self._through()
        limit = caller.patience.timeout_s if timeout_s is None else timeout_s
        handle: Handle[Any] = caller.patience.handle(f"registry at {self.address}: {payload['op']}")
        _Attempt(caller, payload, read, handle, time.monotonic() + limit).go()
        return handle

    def _poll(self) -> None:
        assert self._polled is not None
        _Attempt(self._through(), self._polled, self._told, Handle("watch"), None).go()

    def _told(self, answer: dict[str, Any]) -> None:
        changes: list[Change] = []
        if answer["whole"]:
            now = {r.id: r for r in map(from_plain, answer["records"])}
            changes += [Left(r, True) for id, r in self._seen.items() if now.get(id) != r]
            changes += [Joined(r) for id, r in now.items() if self._seen.get(id) != r]
        for row in answer.get("changes", ()):
            record = from_plain(row["record"])
            changes.append(Joined(record) if row["joined"] else Left(record, row["expired"]))
        for change in changes:
            if isinstance(change, Joined):
                self._seen[change.record.id] = change.record
            else:
                self._seen.pop(change.record.id, None)
                self._cache.pop(change.record.id, None)
            for watcher in list(self._watchers):
                watcher(change)
        self._polled = {"op": "watch", "boot": answer["boot"], "since": answer["count"]}
        if self._watchers:
            self._poll()
        else:
            self._polled = None


class _Attempt:
    """One operation, asked again while the server cannot be reached."""

    def __init__(
        self,
        caller: "Caller",
        payload: dict[str, object],
        read: Callable[[Any], Any],
        handle: Handle[Any],
        deadline: float | None,
    ) -> None:
        self._caller = caller
        self._payload = payload
        self._read = read
        self._handle = handle
        self._deadline = deadline

    def go(self) -> None:
        """Ask once more."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            asked = self._caller.ask(SERVICE, self._payload, NAME, left)
        except CommError as error:
            self._handle.set_error(error)
            return
        asked.add_done_callback(self._answered)

    def _answered(self, asked: Handle[Any]) -> None:
        error = asked.exception()
        if error is None:
            try:
                self._handle.set_result(self._read(asked.result(0.0)))
            except (AttributeError, LookupError, TypeError, ValueError) as malformed:
                said = f"{self._handle.what}: an answer that makes no sense: {malformed!r}"
                self._handle.set_error(ProtocolError(said))
        elif isinstance(error, PeerLost) and self._is_in_time():
            self._caller.later(RETRY_S, self.go)
        elif isinstance(error, Timeout):
            self._handle.set_error(
                Timeout(
                    f"{self._handle.what}: no answer in time; is the registry running there?",
                    operation=self._handle.what,
                    peer=NAME,
                )
            )
        else:
            self._handle.set_error(error)

    def _is_in_time(self) -> bool:
        return self._deadline is None or time.monotonic() + RETRY_S < self._deadline

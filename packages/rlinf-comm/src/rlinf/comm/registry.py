"""Who is there: WorkerRecord, the Registry, and one that lives in this process.

The registry is soft state. A worker holds a lease that its heartbeats renew, and a heartbeat
carries the whole record, so a registry that was restarted knows everybody again one heartbeat
later. Registering a name again makes a new incarnation with a higher epoch; the old one is stale.
Readers may keep records: a stale one is found out by the handshake.
"""

import difflib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from rlinf.comm.address import Address, WorkerId
from rlinf.comm.device import Device
from rlinf.comm.errors import StaleEpoch, Timeout, UnknownWorker
from rlinf.comm.handle import DEFAULT, DEFAULT_TIMEOUT_S, Default, Handle, TimeoutLike

if TYPE_CHECKING:
    from rlinf.comm.caller import Caller

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One incarnation of one worker.

    Attributes:
        id: Its name.
        epoch: Its incarnation: higher is newer; 0: not known.
        addresses: Where it listens, one a transport.
        host: Which host (and network namespace) it is on; equal means reachable in memory.
        pid: Its process there.
        device: What it computes on.
        metadata: Whatever the worker wants to tell.
    """

    id: WorkerId
    epoch: int
    addresses: tuple[Address, ...] = ()
    host: str = ""
    pid: int = 0
    device: Device = field(default_factory=lambda: Device("cpu", 0))
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Joined:
    """A record is new in the registry (or a new incarnation has replaced an old one)."""

    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class Left:
    """A record is gone; `expired`: without a goodbye."""

    record: WorkerRecord
    expired: bool


Change = Joined | Left
Watcher = Callable[[Change], None]


class Registry(ABC):
    """Where workers find each other.

    Attributes:
        token: The secret that every endpoint of this registry proves to hold.
        host: Address of the registry; endpoints listen on an interface that reaches it.
    """

    token: bytes
    host: str = "127.0.0.1"

    def bind(self, caller: "Caller") -> "Registry":
        """The registry as one endpoint uses it (a client talks through the endpoint)."""
        return self

    @abstractmethod
    def register(self, record: WorkerRecord) -> Handle[WorkerRecord]:
        """Enter a new incarnation; the result has its final epoch (higher than any before)."""

    @abstractmethod
    def renew(self, record: WorkerRecord) -> Handle[None]:
        """Heartbeat. Fails with `StaleEpoch` if another incarnation has taken the name."""

    @abstractmethod
    def unregister(self, id: WorkerId, epoch: int) -> Handle[None]:
        """Leave. Does nothing where that incarnation is not registered (any more)."""

    @abstractmethod
    def find(
        self, id: WorkerId, timeout_s: float | None, *, fresh: bool = False
    ) -> Handle[WorkerRecord]:
        """The record of a worker, once it is registered; `fresh`: not one kept from before.

        The handle may stay pending beyond `timeout_s` where nobody drives it; `lookup` does not.
        """

    @abstractmethod
    def members(self, group: str | None = None) -> tuple[WorkerRecord, ...]:
        """Everybody (of a group) that is registered now, ordered by id."""

    @abstractmethod
    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher(change)` from now on; returns what ends it."""

    @abstractmethod
    def unknown(self, id: WorkerId, timeout_s: float | None) -> UnknownWorker:
        """The error for a worker that did not register in time; names the nearest that did."""

    def lookup(self, id: str | WorkerId, timeout: TimeoutLike = DEFAULT) -> WorkerRecord:
        """Wait until the worker is registered.

        Raises:
            UnknownWorker: It was not, within the timeout.
        """
        limit = DEFAULT_TIMEOUT_S if isinstance(timeout, Default) else timeout
        who = WorkerId.parse(id)
        found = self.find(who, limit)
        try:
            return found.result(limit)
        except Timeout:
            found.cancel()
            raise self.unknown(who, limit) from None


def unknown_worker(
    id: WorkerId, timeout_s: float | None, known: Iterable[WorkerId]
) -> UnknownWorker:
    """The error that names the nearest known workers."""
    names = sorted(str(other) for other in known)
    near = difflib.get_close_matches(str(id), names, n=3, cutoff=0.5)
    if near:
        hint = f"the nearest known are {', '.join(near)}"
    elif names:
        hint = f"known are {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")
    else:
        hint = "nobody is registered"
    return UnknownWorker(
        f"no worker {id} registered within {timeout_s} s; {hint}. "
        "Check the name, and that the worker has started with this registry's address",
        peer=id,
    )


class MemoryRegistry(Registry):
    """The registry itself, in this process; thread-safe. `RegistryServer` serves one.

    Args:
        token: The secret; made up where None.
        lease_s: How long a record lives without a heartbeat.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        token: bytes | None = None,
        *,
        lease_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token = token if token is not None else secrets.token_bytes(32)
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.RLock()
        self._records: dict[WorkerId, WorkerRecord] = {}
        self._until: dict[WorkerId, float] = {}
        self._epochs: dict[WorkerId, int] = {}
        self._finds: dict[WorkerId, list[Handle[WorkerRecord]]] = {}
        self._watchers: list[Watcher] = []

    def register(self, record: WorkerRecord) -> Handle[WorkerRecord]:
        """Enter a new incarnation: at least the epoch it proposes, and above all before it."""
        with self._lock:
            self.expire()
            epoch = max(record.epoch, self._epochs.get(record.id, 0) + 1)
            record = replace(record, epoch=epoch)
            old = self._records.get(record.id)
            changes: list[Change] = [] if old is None else [Left(old, expired=True)]
            found = self._enter(record)
        self._tell([*changes, Joined(record)])
        for handle in found:
            handle.set_result(record)
        return _done("register", record)

    def renew(self, record: WorkerRecord) -> Handle[None]:
        """Extend the lease; enters the record where this registry has (for)gotten it."""
        found: list[Handle[WorkerRecord]] = []
        with self._lock:
            newest = self._epochs.get(record.id, 0)
            if record.epoch < newest:
                handle: Handle[None] = Handle("renew")
                handle.set_error(stale(record, newest))
                return handle
            new = self._records.get(record.id) != record
            if new:
                found = self._enter(record)
            else:
                self._until[record.id] = self._clock() + self._lease_s
            self.expire()
        if new:
            self._tell([Joined(record)])
        for waiting in found:
            waiting.set_result(record)
        return _done("renew", None)

    def unregister(self, id: WorkerId, epoch: int) -> Handle[None]:
        """Leave, if this is the current incarnation."""
        with self._lock:
            record = self._records.get(id)
            if record is not None and record.epoch == epoch:
                self._remove(id)
            else:
                record = None
        if record is not None:
            self._tell([Left(record, expired=False)])
        return _done("unregister", None)

    def find(
        self, id: WorkerId, timeout_s: float | None, *, fresh: bool = False
    ) -> Handle[WorkerRecord]:
        """Done at once if the worker is registered, else when it is."""
        with self._lock:
            self.expire()
            record = self._records.get(id)
            if record is not None:
                return _done("find", record)
            handle: Handle[WorkerRecord] = Handle(f"lookup of {id}", timeout_s=timeout_s)
            waiting = self._finds.setdefault(id, [])
            waiting[:] = [other for other in waiting if not other.done()]
            waiting.append(handle)
            return handle

    def members(self, group: str | None = None) -> tuple[WorkerRecord, ...]:
        """Everybody (of a group), ordered by id."""
        with self._lock:
            self.expire()
            found = [r for r in self._records.values() if group is None or r.id.group == group]
        return tuple(sorted(found, key=lambda record: record.id))

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Changes are told on the thread that makes them."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def unknown(self, id: WorkerId, timeout_s: float | None) -> UnknownWorker:
        """The error that names the nearest known."""
        return unknown_worker(id, timeout_s, list(self._records))

    def expire(self) -> None:
        """Drop the records whose lease is over; called by every other method as well."""
        now = self._clock()
        with self._lock:
            over = [id for id, until in self._until.items() if until <= now]
            changes = [Left(self._remove(id), expired=True) for id in over]
        self._tell(changes)

    def _enter(self, record: WorkerRecord) -> list[Handle[WorkerRecord]]:
        self._records[record.id] = record
        self._epochs[record.id] = record.epoch
        self._until[record.id] = self._clock() + self._lease_s
        return self._finds.pop(record.id, [])

    def _remove(self, id: WorkerId) -> WorkerRecord:
        del self._until[id]
        return self._records.pop(id)

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            for watcher in list(self._watchers):
                watcher(change)


def stale(record: WorkerRecord, newest: int) -> StaleEpoch:
    """The error for an incarnation that has been replaced."""
    return StaleEpoch(
        f"{record.id} (epoch {record.epoch}) has been replaced by epoch {newest}: "
        "another process registered under this name later; this one should end",
        peer=record.id,
        epoch=newest,
    )


def _done(what: str, value: T) -> Handle[T]:
    handle: Handle[T] = Handle(what)
    handle.set_result(value)
    return handle

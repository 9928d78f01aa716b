"""Endpoint: the door. A named worker sends any object to another by its name."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf.comm.address import WorkerId
from rlinf.comm.caller import Caller
from rlinf.comm.config import CommConfig
from rlinf.comm.device import Device
from rlinf.comm.errors import CommError, EndpointClosed, ForkedProcess, Timeout
from rlinf.comm.events import Sink
from rlinf.comm.exchange import Exchange
from rlinf.comm.fork import guard
from rlinf.comm.frame import MESSAGE, Outgoing
from rlinf.comm.handle import DEFAULT, Default, Handle, TimeoutLike
from rlinf.comm.host import host_id
from rlinf.comm.lifecycle import DEAD_AFTER_S
from rlinf.comm.mailbox import ANY, Any_
from rlinf.comm.manager import ConnectionManager, Outfit
from rlinf.comm.membership import Membership
from rlinf.comm.plugins import transports
from rlinf.comm.progress import Loop
from rlinf.comm.registry import Registry, WorkerRecord
from rlinf.comm.request import Handler
from rlinf.comm.transports.base import Surroundings, Transport
from rlinf.comm.transports.tcp import host_towards

log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """Totals of one endpoint since it was made, and what it holds now."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int
    waiting_bytes: int
    connections: Mapping[str, str]


class Endpoint:
    """One named worker's door to all others. Thread-safe; not fork-safe.

    Order is kept per (source, tag). Every wait has a deadline: `timeout` in seconds, by default
    `config.connection_timeout_s`; None waits for ever and says so in the log.

    Args:
        id: "group/rank", unique in the registry; registering it again replaces the older one.
        registry: Where to find the others: a MemoryRegistry, RegistryServer or RegistryClient.
        config: Settings; `CommConfig()` where None.
        device: What this worker computes on; the CPU where None.
        sink: Takes events, on the dispatching thread; must not block.
        metadata: Told to everybody in the registry's record.

    Attributes:
        id: Its name.
        epoch: Its incarnation.
        record: What the registry tells others about it.
        config: Its settings.
    """

    def __init__(
        self,
        id: str | WorkerId,
        *,
        registry: Registry,
        config: CommConfig | None = None,
        device: Device | None = None,
        sink: Sink | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.id = WorkerId.parse(id)
        config = config or CommConfig()
        if not config.host:
            config = replace(config, host=host_towards(registry.host))
        self.config = config
        self._ids: dict[str, WorkerId] = {}
        self._refusal: CommError | None = None
        self._exchange = Exchange(self.id, allow_pickle=config.allow_pickle)
        if sink is not None:
            self._exchange.sinks.append(sink)
        self._loop = Loop(f"rlinf-{self.id}")
        self.record = WorkerRecord(
            self.id,
            time.time_ns(),
            host=host_id(),
            pid=os.getpid(),
            device=device or Device("cpu"),
            metadata=dict(metadata or {}),
        )
        self.epoch = self.record.epoch
        self._caller = Caller(self._exchange, self._loop, config.connection_timeout_s)
        self._registry = registry.bind(self._caller)
        self._manager = ConnectionManager(self._outfit(registry.token))
        self._exchange.connections = self._manager
        self._transports: dict[str, Transport] = {}
        self._membership = Membership(self._registry, self._loop, config.heartbeat_s)
        guard(self)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _outfit(self, token: bytes) -> Outfit:
        limit = self.config.connection_timeout_s
        return Outfit(
            me=self.record,
            token=token,
            loop=self._loop,
            find=lambda id, fresh: self._registry.find(id, limit, fresh=fresh),
            unknown=self._registry.unknown,
            upward=self._exchange,
            window_bytes=self.config.window_bytes,
            timeout_s=limit,
            priority=self.config.backend_priority,
        )

    def _open(self) -> None:
        surroundings = Surroundings(
            name=f"{self.id}-{os.getpid()}-{self.epoch:x}",
            loop=self._loop,
            config=self.config,
            owner=self._manager,
        )
        for name, kind in transports()[0].items():
            self._transports[name] = kind(surroundings)
        addresses = tuple(transport.listen() for transport in self._transports.values())
        self._manager.use(self._transports)
        self._manager.me = replace(self.record, addresses=addresses)
        self.record = self._membership.join(self._manager.me, self.config.connection_timeout_s)
        self._manager.me = self.record
        self.epoch = self.record.epoch
        self._loop.call_later(self.config.idle_s, self._close_idle)

    # -- messages ------------------------------------------------------------------------------

    def send(
        self, obj: object, to: str | WorkerId, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> None:
        """Send an object; returns when it may be changed (its bytes are copied or written).

        Raises:
            Timeout: The peer did not connect (ConnectTimeout), read or receive in time.
            PeerLost: The peer is gone. UnknownWorker: It never registered.
            CodecError: The object cannot be encoded.
        """
        self._check()
        peer = self._id(to)
        frame = self._exchange.pack(MESSAGE, obj, tag=tag)
        link = self._manager.link_to(peer)
        copied = frame.nbytes <= SMALL_BYTES or (link is not None and link.copies)
        if copied and self._manager.try_post(peer, frame):
            self._exchange.sent(peer, frame)
            return
        handle = self._post(frame, peer, "send to")
        self._await(handle, peer, timeout)

    def isend(
        self, obj: object, to: str | WorkerId, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> Handle[None]:
        """Send without waiting: the object may be changed at once, what must wait is copied.

        The handle is done when the message has been handed to the transport.
        """
        self._check()
        peer = self._id(to)
        frame = self._exchange.pack(MESSAGE, obj, tag=tag)
        if self._manager.try_post(peer, frame):
            self._exchange.sent(peer, frame)
            done: Handle[None] = Handle("isend", progress=self._loop)
            done.set_result(None)
            return done
        frame.own()
        handle = self._post(frame, peer, "isend to")
        self._expire(handle, peer, timeout)
        return handle

    def broadcast(
        self,
        obj: object,
        to: Sequence[str | WorkerId],
        *,
        tag: int = 0,
        timeout: TimeoutLike = DEFAULT,
    ) -> None:
        """Send one object to many; it is encoded once, and written once a host.

        Raises:
            The error of the first receiver that failed, once all others have been sent to.
        """
        self._check()
        peers = [self._id(one) for one in to]
        packed = self._exchange.pack(MESSAGE, obj, tag=tag)
        handles = [self._post(packed.copy(), peer, "broadcast to") for peer in peers]
        limit = self._limit(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        failed: list[CommError] = []
        for handle, peer in zip(handles, peers, strict=True):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._await(handle, peer, left)
            except CommError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def recv(
        self, source: str | WorkerId | Any_ = ANY, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> Any:
        """Receive the next object from `source` (ANY: whoever sent first).

        Raises:
            Timeout: Nothing came in time.
            PeerLost: The source is gone (and all it had sent is received).
            CodecError: What came cannot be decoded.
        """
        return self.recv_from(source, tag=tag, timeout=timeout)[0]

    def recv_from(
        self, source: str | WorkerId | Any_ = ANY, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> tuple[Any, WorkerId]:
        """Like `recv`, but returns (object, who sent it)."""
        self._check()
        who = source if isinstance(source, Any_) else self._id(source)
        letter = self._exchange.mailbox.take(who, tag)
        if letter is not None:
            return self._exchange.open(letter), letter.source
        handle: Handle[tuple[Any, WorkerId]] = self._caller.handle(f"recv from {who} (tag {tag})")
        self._exchange.ask(who, tag, handle, named=True)
        self._watch(handle, who)
        self._await(handle, who, timeout)
        return handle.result(0.0)

    def irecv(
        self, source: str | WorkerId | Any_ = ANY, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> Handle[Any]:
        """Receive without waiting; the handle's result is the object."""
        self._check()
        who = source if isinstance(source, Any_) else self._id(source)
        handle: Handle[Any] = self._caller.handle(f"recv from {who} (tag {tag})")
        self._exchange.ask(who, tag, handle, named=False)
        self._watch(handle, who)
        self._expire(handle, who, timeout)
        return handle

    # -- services ------------------------------------------------------------------------------

    def call(
        self, service: str, payload: object, *, to: str | WorkerId, timeout: TimeoutLike = DEFAULT
    ) -> Handle[Any]:
        """Ask a service of another worker; the handle's result is its reply, or its error."""
        self._check()
        return self._caller.call(service, payload, self._id(to), self._limit(timeout))

    def serve(self, service: str, handler: Handler) -> None:
        """Answer calls of this name. The handler runs on the dispatching thread: never block it.

        What it raises goes to the caller and into the log.
        """
        self._check()
        self._exchange.services.add(service, handler)

    # -- the rest ------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: object = None) -> Any:
        """An array (a torch tensor for a torch dtype) in memory that is sent without a copy.

        It is the receiver's as soon as it is sent: do not write to it again before the receiver
        is done with it, or send a copy. Ordinary memory where no transport has such.
        """
        self._check()
        from rlinf.comm.arena import empty

        return empty(self._transports.values(), shape, dtype)

    def add_sink(self, sink: Sink) -> None:
        """Tell this sink of every event from now on."""
        self._exchange.sinks.append(sink)

    def statistics(self) -> EndpointStatistics:
        """What was sent and received, and which transport leads to whom."""
        counters = self._exchange.counters
        links = {str(p.id): p.link.transport for p in self._manager.peers() if p.link is not None}
        return EndpointStatistics(
            counters.sent,
            counters.sent_bytes,
            counters.received,
            counters.received_bytes,
            self._exchange.mailbox.nbytes,
            links,
        )

    def close(self) -> None:
        """Send what is queued, say goodbye, fail what is pending with EndpointClosed. Idempotent."""
        if self._refusal is not None:
            return
        self._refusal = EndpointClosed(f"endpoint {self.id} is closed", operation="close")
        self._exchange.fail(self._refusal)
        self._linger()
        self._membership.leave(min(1.0, self.config.connection_timeout_s))
        self._manager.say_goodbye()
        self._linger()
        for link in self._manager.links():
            link.close("this endpoint was closed")
        for peer in self._manager.peers():
            for frame in peer.waiting:
                if frame.cares is not None:
                    frame.cares.set_error(self._refusal)
        for transport in self._transports.values():
            transport.close()
        self._exchange.fail(self._refusal)
        self._loop.close()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Endpoint {self.id} epoch {self.epoch}>"

    # -- inside --------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """In a forked child: refuse everything, touch nothing of the parent's."""
        self._refusal = ForkedProcess(
            f"endpoint {self.id} belongs to the parent process; "
            "start processes with the spawn or forkserver method and make an endpoint in each"
        )
        self._loop.abandon()
        for link in self._manager.links():
            link.abandon()
        for transport in self._transports.values():
            transport.abandon()

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _id(self, who: str | WorkerId) -> WorkerId:
        if isinstance(who, WorkerId):
            return who
        known = self._ids.get(who)
        if known is None:
            known = self._ids[who] = WorkerId.parse(who)
        return known

    def _limit(self, timeout: TimeoutLike) -> float | None:
        return self.config.connection_timeout_s if isinstance(timeout, Default) else timeout

    def _post(self, frame: Outgoing, peer: WorkerId, what: str) -> Handle[None]:
        handle: Handle[None] = self._caller.handle(f"{what} {peer} ({frame.nbytes} bytes)")
        frame.cares = handle
        frame.done = handle
        self._manager.post(peer, frame)
        self._exchange.sent(peer, frame)
        return handle

    def _await(self, handle: Handle[Any], peer: WorkerId | Any_, timeout: TimeoutLike) -> None:
        """Wait; a deadline that passes ends the operation itself."""
        limit = self._limit(timeout)
        try:
            handle.wait(limit)
        except Timeout:
            handle.set_error(self._caller.late(handle, peer, limit))
        error = handle.exception()
        if error is not None:
            raise error

    def _expire(self, handle: Handle[Any], peer: WorkerId | Any_, timeout: TimeoutLike) -> None:
        limit = self._limit(timeout)
        self._caller.expire(handle, limit, lambda: self._caller.late(handle, peer, limit))

    def _watch(self, handle: Handle[Any], who: WorkerId | Any_) -> None:
        """Whoever receives from a peer that is silent and not connected wants to see it die."""
        if isinstance(who, Any_) or handle.done() or self._manager.link_to(who) is not None:
            return

        def look() -> None:
            if not handle.done() and self._refusal is None:
                self._manager.want(who)
                later = self._loop.call_later(DEAD_AFTER_S, give_up)
                handle.add_done_callback(lambda _: later.cancel())

        def give_up() -> None:
            lost = self._manager.lost(who)
            if lost is not None:
                handle.set_error(lost)

        timer = self._loop.call_later(self.config.watch_s, look)
        handle.add_done_callback(lambda _: timer.cancel())

    def _close_idle(self) -> None:
        if self._refusal is None:
            self._manager.close_idle(lambda peer: any(True for _ in self._exchange.calls.of(peer)))
            self._loop.call_later(self.config.idle_s, self._close_idle)

    def _linger(self) -> None:
        """Wait, for a while, until what is queued has left."""
        flushed: Handle[None] = Handle("flush", progress=self._loop)
        deadline = time.monotonic() + self.config.linger_s

        def look() -> None:
            if not self._manager.is_busy() or time.monotonic() >= deadline:
                flushed.set_result(None)
            else:
                self._loop.call_later(0.002, look)

        look()
        if not flushed.done():
            flushed.wait(self.config.linger_s + 1.0)

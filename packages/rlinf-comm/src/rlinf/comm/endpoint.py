"""Endpoint: the door. A named worker sends any object to another by its name."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf.comm.address import WorkerId
from rlinf.comm.arena import empty
from rlinf.comm.config import CommConfig
from rlinf.comm.desk import MessageDesk
from rlinf.comm.device import Device
from rlinf.comm.errors import CommError, EndpointClosed, ForkedProcess
from rlinf.comm.events import Closing, Sink
from rlinf.comm.fork import guard
from rlinf.comm.frame import MESSAGE, Outgoing
from rlinf.comm.handle import DEFAULT, Default, Handle, TimeoutLike
from rlinf.comm.host import host_id
from rlinf.comm.interior import Interior
from rlinf.comm.into import fill
from rlinf.comm.logs import show
from rlinf.comm.mailbox import ANY, Any_, Wish
from rlinf.comm.many import Many
from rlinf.comm.peers import Peer, lost_error
from rlinf.comm.registry import Registry, WorkerRecord
from rlinf.comm.request import Handler
from rlinf.comm.transports.reading import TAKE_S
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
        registry: The registry it is in.
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
        show(config.log_level)
        self.record = WorkerRecord(
            self.id,
            time.time_ns(),
            host=host_id(),
            pid=os.getpid(),
            device=device or Device("cpu"),
            metadata=dict(metadata or {}),
        )
        self.epoch = self.record.epoch
        self._refusal: CommError | None = None
        self._known: dict[object, Peer] = {}
        self._in = Interior(self.record, config, registry)
        self._loop = self._in.loop
        self._exchange = self._in.exchange
        self._mailbox = self._exchange.mailbox
        self._outbox = self._in.manager.outbox
        self._sinks = self._exchange.ledger.sinks
        self._desk = MessageDesk(self._mailbox, self._exchange.ledger, self._loop)
        self._encode = self._exchange.encode
        self._try_small = self._outbox.try_small
        self._patience = self._in.patience
        self._timeout_s = config.connection_timeout_s
        self.registry = self._in.registry
        if sink is not None:
            self._exchange.ledger.sinks.append(sink)
        guard(self, Endpoint._after_fork)
        try:
            self.record = self._in.open()
            self.epoch = self.record.epoch
        except BaseException:
            self.close()
            raise

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
        peer = self._known.get(to) or self._peer(to)
        flags, header, buffers = self._encode(obj)
        if not buffers and self._try_small(peer, tag, flags, header):
            if self._sinks:
                self._exchange.ledger.tell_sent(peer, MESSAGE, tag, len(header))
            return
        frame = Outgoing(MESSAGE, header, buffers, tag=tag)
        frame.flags = flags
        self._send(frame, peer, timeout)

    def isend(
        self, obj: object, to: str | WorkerId, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> Handle[None]:
        """Send without waiting: the object may be changed at once, what must wait is copied.

        The handle is done when the message has been handed to the transport.
        """
        self._check()
        peer = self._peer(to)
        frame = self._exchange.pack(MESSAGE, obj, tag=tag)
        if self._outbox.try_post(peer, frame):
            self._exchange.ledger.sent(peer, MESSAGE, tag, frame.nbytes)
            done: Handle[None] = Handle("isend", progress=self._loop)
            done.set_result(None)
            return done
        frame.own()
        handle = self._post(frame, peer, "isend to")
        self._exchange.ledger.sent(peer, MESSAGE, tag, frame.nbytes)
        self._patience.expire(handle, timeout, peer)
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
            CommError: That of the first receiver which failed, once all others have been sent to.
        """
        self._check()
        peers = [self._peer(one) for one in to]
        packed = self._exchange.pack(MESSAGE, obj, tag=tag)
        handles = [self._post(packed.copy(), peer, "broadcast to") for peer in peers]
        limit = self._patience.limit(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        failed: list[CommError] = []
        for handle, peer in zip(handles, peers, strict=True):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._patience.wait(handle, left, peer)
                self._exchange.ledger.sent(peer, MESSAGE, tag, packed.nbytes)
            except CommError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def recv(
        self,
        source: str | WorkerId | Any_ = ANY,
        *,
        tag: int = 0,
        timeout: TimeoutLike = DEFAULT,
        out: Any = None,
    ) -> Any:
        """Receive the next object from `source` (ANY: whoever sent first).

        Into `out`, if that is given: an array or tensor, or a dict, list or tuple of such; it is
        returned, and untouched unless everything fits.

        Raises:
            Timeout: Nothing came in time.
            PeerLost: The source is gone (and all it had sent is received).
            CodecError: What came cannot be decoded.
            MessageMismatch: It has another dtype, shape or structure than `out`; it is lost.
        """
        begun = time.monotonic()
        limit = self._timeout_s if isinstance(timeout, Default) else timeout
        peer = self._known.get(source)
        if peer is not None and peer.link is not None and (limit is None or limit > TAKE_S):
            letter = peer.link.take(tag, self._desk, begun, limit)
            if letter is not None:
                obj = letter if isinstance(letter, bytes) else self._exchange.unpack(letter)
                return obj if out is None else fill(out, obj, peer.id)
        obj, sender = self._receive(source, tag, timeout, begun)
        return obj if out is None else fill(out, obj, sender)

    def recv_from(
        self, source: str | WorkerId | Any_ = ANY, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> tuple[Any, WorkerId]:
        """Like `recv`, but returns (object, who sent it)."""
        if not isinstance(source, Any_):
            return self.recv(source, tag=tag, timeout=timeout), WorkerId.parse(source)
        return self._receive(source, tag, timeout, time.monotonic())

    def irecv(
        self, source: str | WorkerId | Any_ = ANY, *, tag: int = 0, timeout: TimeoutLike = DEFAULT
    ) -> Handle[Any]:
        """Receive without waiting; the handle's result is the object."""
        self._check()
        peer = None if isinstance(source, Any_) else self._peer(source)
        handle = self._ask(peer, tag, named=False)
        self._patience.expire(handle, timeout, peer)
        return handle

    @property
    def many(self) -> Many:
        """`send` and `recv` for many small messages at a time."""
        return Many(self)

    # -- services ------------------------------------------------------------------------------

    def call(
        self, service: str, payload: object, *, to: str | WorkerId, timeout: TimeoutLike = DEFAULT
    ) -> Handle[Any]:
        """Ask a service of another worker; the handle's result is its reply, or its error."""
        self._check()
        return self._in.caller.call(service, payload, self._peer(to), timeout)

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
        is done with it, or send a copy (`CommConfig.debug_in_place` finds out who does). Small
        arrays (under 256 KiB) are copied all the same. Ordinary memory where no transport has any.
        """
        self._check()
        return empty(self._in.transports.values(), shape, dtype)

    def add_sink(self, sink: Sink) -> None:
        """Tell this sink of every event from now on."""
        self._exchange.ledger.sinks.append(sink)

    def statistics(self) -> EndpointStatistics:
        """What was sent and received, and which transport leads to whom."""
        me, peers = self.id, self._in.peers.all()
        return EndpointStatistics(
            sum(peer.sent for peer in peers),
            sum(peer.sent_bytes for peer in peers),
            sum(peer.received for peer in peers),
            sum(peer.received_bytes for peer in peers),
            self._mailbox.nbytes,
            {str(p.id): p.link.transport for p in peers if p.link and p.id != me},
        )

    def close(self) -> None:
        """Send what is queued, say goodbye, fail what is pending with EndpointClosed.

        May be called again, and from any thread.
        """
        if self._refusal is not None:
            return
        self._exchange.ledger.emit(Closing(self.id, self.epoch, time.monotonic()))
        self._refusal = EndpointClosed(f"endpoint {self.id} is closed", operation="close")
        self._known = {}
        self._in.close(self._refusal)

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Endpoint {self.id} epoch {self.epoch}>"

    # -- inside --------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        """In a forked child: refuse everything, touch nothing of the parent's, take no lock."""
        if self._refusal is not None:
            return
        self._refusal = ForkedProcess(
            f"endpoint {self.id} belongs to the parent process; "
            "start processes with the spawn or forkserver method and make an endpoint in each"
        )
        self._known = {}
        self._in.abandon()

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _peer(self, who: str | WorkerId) -> Peer:
        """The peer of a name; `_known` is empty from the moment this endpoint is closed."""
        self._check()
        known = self._known.get(who)
        if known is None:
            known = self._known[who] = self._in.peers.get(WorkerId.parse(who))
        return known

    def _send(self, frame: Outgoing, peer: Peer, timeout: TimeoutLike, count: int = 1) -> None:
        link = peer.link
        copied = frame.nbytes <= SMALL_BYTES or (link is not None and link.copies)
        if not (copied and self._outbox.try_post(peer, frame)):
            self._patience.wait(self._post(frame, peer, "send to"), timeout, peer)
        self._exchange.ledger.sent(peer, MESSAGE, frame.tag, frame.nbytes, count)

    def _post(self, frame: Outgoing, peer: Peer, what: str) -> Handle[None]:
        handle: Handle[None] = self._patience.handle(f"{what} {peer.name} ({frame.nbytes} bytes)")
        frame.cares = handle
        frame.done = handle
        self._outbox.post(peer, frame)
        return handle

    def _receive(
        self, source: str | WorkerId | Any_, tag: int, timeout: TimeoutLike, begun: float
    ) -> tuple[Any, WorkerId]:
        """Receive by way of the mailbox, waiting for whatever comes to this endpoint."""
        self._check()
        peer = None if isinstance(source, Any_) else self._peer(source)
        link = None if peer is None else peer.link
        letter = self._mailbox.take(ANY if peer is None else peer.id, tag)
        if letter is not None:
            return self._exchange.open(letter), letter.source
        wish = self._ask(peer, tag, named=True)
        if peer is not None and link is not None and peer.link is None and peer.down is not None:
            down = peer.down
            self._exchange.lost(peer, lost_error(peer.id, down.epoch, down.reason))
        try:
            self._patience.wait(wish, timeout, peer, begun)
        finally:
            if not wish.done():  # a signal has ended the wait
                wish.cancel()
        received: tuple[Any, WorkerId] = wish.result(0.0)
        return received

    def _ask(self, peer: Peer | None, tag: int, *, named: bool) -> Wish:
        who = ANY if peer is None else peer.id
        wish = Wish(_receiving(peer, tag), self._loop, self._patience.timeout_s, who, named)
        self._exchange.ask(wish, tag)
        if peer is not None and peer.link is None and not wish.done():
            self._patience.watch(wish, peer)
        return wish


def handle_of(endpoint: Endpoint, what: str, timeout: TimeoutLike = DEFAULT) -> Handle[Any]:
    """A handle for the caller to complete: whoever waits for it dispatches meanwhile.

    Args:
        timeout: Seconds that a wait lasts which names no deadline; None: for ever.
    """
    endpoint._check()
    handle = endpoint._patience.handle(what)
    handle.timeout_s = endpoint._patience.limit(timeout)
    return handle


def _receiving(peer: Peer | None, tag: int) -> str:
    what = "recv from anybody" if peer is None else peer.receiving
    return f"{what} (tag {tag})" if tag else what

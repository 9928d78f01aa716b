"""Patience: how long an operation waits, and what to say when it has waited long enough."""

import time
from collections.abc import Callable
from typing import Any

from rlinf.comm import lifecycle as life
from rlinf.comm.address import WorkerId
from rlinf.comm.errors import CommError, ConnectTimeout, PoolExhausted, Timeout
from rlinf.comm.exchange import Exchange
from rlinf.comm.handle import Default, Handle, TimeoutLike
from rlinf.comm.manager import ConnectionManager
from rlinf.comm.peers import Peer, lost_error
from rlinf.comm.progress import Loop


class Patience:
    """Deadlines of one endpoint.

    Args:
        loop: Runs the deadlines.
        timeout_s: The deadline of what names none.
        watch_s: See `CommConfig.watch_s`.
        unknown: The error for a worker that never registered.
    """

    def __init__(
        self,
        loop: Loop,
        timeout_s: float,
        watch_s: float,
        unknown: Callable[[WorkerId, float | None], CommError],
    ) -> None:
        self.timeout_s = timeout_s
        self._loop = loop
        self._watch_s = watch_s
        self._unknown = unknown
        self.manager: ConnectionManager
        self.exchange: Exchange

    def handle(self, what: str) -> Handle[Any]:
        """A handle whose waiter drives the endpoint."""
        return Handle(what, progress=self._loop, timeout_s=self.timeout_s)

    def limit(self, timeout: TimeoutLike) -> float | None:
        """Seconds, with the default filled in."""
        return self.timeout_s if isinstance(timeout, Default) else timeout

    def wait(
        self,
        handle: Handle[Any],
        timeout: TimeoutLike,
        peer: Peer | None,
        since: float | None = None,
    ) -> None:
        """Wait; a deadline that passes ends the operation itself. Raises its error.

        Args:
            handle: What to wait for.
            timeout: In seconds.
            peer: Whom it is about.
            since: When the waiting began, as `time.monotonic()` says; None: now.
        """
        if not handle.done():
            limit = self.timeout_s if isinstance(timeout, Default) else timeout
            if limit is None:
                handle.wait(None)
            else:
                begun = time.monotonic() if since is None else since
                self._loop.drive(handle, begun + limit)
                if not handle.done():
                    handle.set_error(self.late(handle.what, peer, limit))
        error = handle.exception()
        if error is not None:
            raise error

    def expire(self, handle: Handle[Any], timeout: TimeoutLike, peer: Peer | None) -> None:
        """End the operation at its deadline, whether anybody waits for it or not."""
        limit = self.timeout_s if isinstance(timeout, Default) else timeout
        self.expire_with(handle, limit, lambda: self.late(handle.what, peer, limit))

    def expire_with(
        self, handle: Handle[Any], limit: float | None, error: Callable[[], CommError]
    ) -> None:
        """The same, with an error of the caller's."""
        handle.timeout_s = limit
        if limit is not None and not handle.done():
            self._loop.expire(time.monotonic() + limit, handle, error)

    def watch(self, handle: Handle[Any], peer: Peer) -> None:
        """Whoever receives from a peer that is silent and not connected wants to see it die."""

        def look() -> None:
            if handle.done() or self.manager.closing:
                return
            self.manager.want(peer)
            later = self._loop.call_later(life.DEAD_AFTER_S, give_up)
            handle.add_done_callback(lambda _: later.cancel())

        def give_up() -> None:
            down = peer.down
            if down is not None and peer.link is None and not handle.done():
                self.exchange.lost(peer, lost_error(peer.id, down.epoch, down.reason))

        timer = self._loop.call_later(self._watch_s, look)
        handle.add_done_callback(lambda _: timer.cancel())

    def late(self, what: str, peer: Peer | None, limit: float | None) -> CommError:
        """The error of an operation that ran into its deadline, by how far the peer got."""
        said = f"{what}: not done within {limit} s"
        if peer is None:
            return Timeout(f"{said}; nobody sent anything")
        to, phase = peer.id, peer.machine.phase
        if phase is life.Phase.ABSENT:
            return Timeout(f"{said}; {to} has not connected", peer=to)
        if phase is life.Phase.RESOLVING:
            return self._unknown(to, limit)
        if peer.link is None:
            where = ", ".join(map(str, peer.record.addresses)) if peer.record else "no address"
            return ConnectTimeout(f"{said}; cannot connect to {to} at {where}", peer=to)
        short = self.manager.transports[peer.link.transport].shortage()
        if peer.waiting and short is not None:
            return PoolExhausted(f"{said}; {short}")
        if peer.waiting:
            out = peer.window.outstanding()
            return Timeout(
                f"{said}; {to} has {out} bytes it has not received yet: "
                "let it receive, or raise window_bytes",
                peer=to,
            )
        return Timeout(f"{said}; {to} is connected but silent", peer=to)

"""Caller: handles with deadlines, and calls of services, for an endpoint and its registry."""

import time
from collections.abc import Callable
from typing import Any

from rlinf.comm.address import WorkerId
from rlinf.comm.errors import CommError, Timeout
from rlinf.comm.exchange import Exchange
from rlinf.comm.frame import REQUEST
from rlinf.comm.handle import Handle
from rlinf.comm.mailbox import Any_
from rlinf.comm.progress import Loop


class Caller:
    """See the module.

    Attributes:
        me: The endpoint's name.
        timeout_s: The deadline of what names none.
    """

    def __init__(self, exchange: Exchange, loop: Loop, timeout_s: float) -> None:
        self.me = exchange.me
        self.timeout_s = timeout_s
        self._exchange = exchange
        self._loop = loop

    def handle(self, what: str) -> Handle[Any]:
        """A handle whose waiter drives the endpoint."""
        return Handle(what, progress=self._loop, timeout_s=self.timeout_s)

    def call(
        self, service: str, payload: object, peer: WorkerId, limit: float | None
    ) -> Handle[Any]:
        """Ask a service; the handle fails at the deadline."""
        handle = self.handle(f"call {service!r} of {peer}")
        frame = self._exchange.pack(REQUEST, payload, service=service)
        frame.cares = handle
        frame.ident = self._exchange.calls.add(handle, peer)
        self.expire(handle, limit, lambda: self.late(handle, peer, limit))
        self._exchange.sent(peer, frame)
        self._exchange.connections.post(peer, frame)
        return handle

    def expire(
        self, handle: Handle[Any], limit: float | None, error: Callable[[], BaseException]
    ) -> None:
        """Complete the handle with `error()` after `limit` seconds, if it is not done by then."""
        handle.timeout_s = limit
        if limit is not None and not handle.done():
            self._loop.expire(time.monotonic() + limit, handle, error)

    def late(self, handle: Handle[Any], peer: WorkerId | Any_, limit: float | None) -> CommError:
        """What to say of an operation whose deadline has passed."""
        said = f"{handle.what}: not done within {limit} s"
        if isinstance(peer, Any_):
            return Timeout(f"{said}; nobody sent anything", operation=handle.what, timeout_s=limit)
        return self._exchange.connections.why_late(peer, said, handle.what, limit)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something on the dispatching thread after that time."""
        self._loop.call_later(seconds, action)

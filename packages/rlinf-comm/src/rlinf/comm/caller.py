"""Caller: calls of services, for an endpoint and its registry."""

from collections.abc import Callable
from typing import Any

from rlinf.comm.address import WorkerId
from rlinf.comm.exchange import Exchange
from rlinf.comm.frame import REQUEST
from rlinf.comm.handle import Handle, TimeoutLike
from rlinf.comm.manager import ConnectionManager
from rlinf.comm.patience import Patience
from rlinf.comm.peers import Peer, Peers
from rlinf.comm.progress import Loop


class Caller:
    """See the module.

    Attributes:
        me: The endpoint's name.
        patience: Its deadlines.
    """

    def __init__(
        self,
        exchange: Exchange,
        peers: Peers,
        manager: ConnectionManager,
        patience: Patience,
        loop: Loop,
    ) -> None:
        self.me = exchange.me
        self.patience = patience
        self._exchange = exchange
        self._peers = peers
        self._manager = manager
        self._loop = loop

    def call(self, service: str, payload: object, peer: Peer, timeout: TimeoutLike) -> Handle[Any]:
        """Ask a service; the handle fails at the deadline."""
        handle = self.patience.handle(f"call {service!r} of {peer.name}")
        frame = self._exchange.pack(REQUEST, payload, service=service)
        frame.cares = handle
        frame.ident = self._exchange.calls.add(handle, peer.id)
        self.patience.expire(handle, timeout, peer)
        self._exchange.ledger.sent(peer, REQUEST, 0, frame.nbytes)
        self._manager.outbox.post(peer, frame)
        return handle

    def ask(self, service: str, payload: object, to: WorkerId, timeout: TimeoutLike) -> Handle[Any]:
        """`call`, by name."""
        return self.call(service, payload, self._peers.get(to), timeout)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something on the dispatching thread after that time."""
        self._loop.call_later(seconds, action)

"""Interior: the parts of an endpoint, how they come to know each other, and how they end."""

import time
from dataclasses import replace

from rlinf.comm.caller import Caller
from rlinf.comm.config import CommConfig
from rlinf.comm.errors import CommError
from rlinf.comm.exchange import Exchange
from rlinf.comm.handle import Handle
from rlinf.comm.inspection import Inspection
from rlinf.comm.manager import ConnectionManager, Outfit
from rlinf.comm.membership import Membership
from rlinf.comm.patience import Patience
from rlinf.comm.peers import Peers
from rlinf.comm.plugins import transports
from rlinf.comm.pool import PrivateMemory
from rlinf.comm.progress import Loop
from rlinf.comm.reception import Reception
from rlinf.comm.registry import Registry, WorkerRecord
from rlinf.comm.transports.base import Surroundings, Transport

LOOK_S = 0.002
LEAVE_S = 1.0


class Interior:
    """See the module.

    Args:
        record: Of the worker, as far as it is known.
        config: Settings, `host` filled in.
        registry: Where to register.

    Attributes:
        loop, peers, exchange, manager, patience, caller, inspection, registry, transports: The
            parts.
    """

    def __init__(self, record: WorkerRecord, config: CommConfig, registry: Registry) -> None:
        limit = config.connection_timeout_s
        self._record = record
        self._config = config
        self._token = registry.token
        self.transports: dict[str, Transport] = {}
        self.loop = Loop(f"rlinf-{record.id}")
        self._memory = PrivateMemory(
            config.pool_bytes, lambda trim: self.loop.call_later(config.pool_idle_s, trim)
        )
        self.peers = Peers(record.id, config.window_bytes)
        self.exchange = Exchange(
            record.id,
            self.peers,
            allow_pickle=config.allow_pickle,
            serialization=config.serialization,
        )
        outfit = Outfit(
            me=record,
            loop=self.loop,
            find=lambda id, fresh: self.registry.find(id, limit, fresh=fresh),
            upward=self.exchange,
            window_bytes=config.window_bytes,
            priority=config.backend_priority,
        )
        self.manager = ConnectionManager(outfit, self.peers)
        self.exchange.outbox = self.manager.outbox
        self.patience = Patience(
            self.loop, limit, config.watch_s, lambda id, limit: self.registry.unknown(id, limit)
        )
        self.patience.manager, self.patience.exchange = self.manager, self.exchange
        self.caller = Caller(self.exchange, self.peers, self.manager, self.patience, self.loop)
        self.inspection = Inspection(self.exchange, self.peers, self.caller)
        self.registry = registry.bind(self.caller)
        self._membership = Membership(self.registry, self.loop, config.heartbeat_s)

    def open(self) -> WorkerRecord:
        """Listen, then register: who is found can be reached. Returns the final record."""
        config, record = self._config, self._record
        reception = Reception(self.peers, self.manager, self.exchange)
        reception.begin(self._token, self.loop, config.connection_timeout_s)
        surroundings = Surroundings(
            name=f"{record.id}-{record.pid}-{record.epoch:x}",
            loop=self.loop,
            config=config,
            owner=reception,
            deferred=self.peers.deferred,
            memory=self._memory,
            device=record.device,
        )
        usable, absent = transports()
        missing = dict(absent)
        for name, kind in usable.items():
            reason = kind.unsuited(record.device, config)
            if reason is not None:
                missing[name] = reason
                continue
            self.transports[name] = kind(surroundings)
            self.exchange.kinds |= kind.kinds
        addresses = tuple(transport.listen() for transport in self.transports.values())
        self.manager.me = replace(record, addresses=addresses)
        self.manager.missing = missing
        self.manager.use(self.transports, reception.greeter, surroundings)
        self.manager.me = self._membership.join(self.manager.me, config.connection_timeout_s)
        self.loop.call_later(config.idle_s, self._close_idle)
        return self.manager.me

    def close(self, error: CommError) -> None:
        """Send what is queued, leave, say goodbye; everything else fails with this error."""
        self.exchange.fail(error)
        self._linger()
        self._membership.leave(min(LEAVE_S, self._config.connection_timeout_s))
        self.manager.say_goodbye()
        self._linger()
        self.manager.close(error)
        for transport in self.transports.values():
            transport.close()
        self.exchange.fail(error)
        self.loop.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's descriptors. Takes no locks."""
        self.loop.abandon()
        for link in tuple(self.peers.links.values()):
            link.abandon()
        for transport in self.transports.values():
            transport.abandon()

    def _close_idle(self) -> None:
        if not self.manager.closing:
            self.manager.close_idle(lambda peer: any(True for _ in self.exchange.calls.of(peer)))
            self.loop.call_later(self._config.idle_s, self._close_idle)

    def _linger(self) -> None:
        """Wait, for a while, until what is queued has left."""
        flushed: Handle[None] = Handle("flush", progress=self.loop)
        deadline = time.monotonic() + self._config.linger_s

        def look() -> None:
            if not self.manager.outbox.is_busy() or time.monotonic() >= deadline:
                flushed.set_result(None)
            else:
                self.loop.call_later(LOOK_S, look)

        look()
        if not flushed.done():
            flushed.wait(self._config.linger_s + 1.0)

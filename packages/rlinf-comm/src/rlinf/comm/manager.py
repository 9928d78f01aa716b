"""ConnectionManager: carries out what `lifecycle` decides. One connection a peer, made lazily.

Everything that changes a connection happens under the lock of `Peers`; callbacks to the endpoint
(`Upward`) happen without it.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rlinf.comm import lifecycle as life
from rlinf.comm.address import WorkerId
from rlinf.comm.errors import CommError, NoTransport
from rlinf.comm.frame import BYE, IDLE, PING, Incoming, Outgoing
from rlinf.comm.handle import Handle
from rlinf.comm.handshake import Party
from rlinf.comm.outbox import Outbox
from rlinf.comm.peers import Peer, Peers, lost_error
from rlinf.comm.progress import Loop
from rlinf.comm.registry import WorkerRecord
from rlinf.comm.selection import Choice, choose
from rlinf.comm.shake import Greeter
from rlinf.comm.transports.base import Link, Surroundings, Transport
from rlinf.comm.transports.inproc import loopback
from rlinf.comm.window import Window

log = logging.getLogger(__name__)


class Upward(Protocol):
    """What the endpoint is told; without locks."""

    def payload(self, link: Link, peer: Peer, frame: Incoming) -> None:
        """A message, request, reply or error has come."""

    def connected(self, link: Link, peer: Peer) -> None:
        """A peer is connected."""

    def disconnected(self, peer: Peer, down: life.Down) -> None:
        """A peer is not any more."""

    def unreachable(self, peer: Peer, error: BaseException) -> None:
        """A peer could not be connected to."""


@dataclass(frozen=True, slots=True)
class Outfit:
    """What a manager works with."""

    me: WorkerRecord
    loop: Loop
    find: Callable[[WorkerId, bool], Handle[WorkerRecord]]
    upward: Upward
    window_bytes: int
    priority: tuple[str, ...]


class ConnectionManager:
    """See the module.

    Attributes:
        me: This side's record; replaced once the registry has given it an epoch.
        closing: Whether no new connection is to be made.
        missing: Why transports are not to be had on this side.
    """

    def __init__(self, outfit: Outfit, peers: Peers) -> None:
        self.me = outfit.me
        self.closing = False
        self.transports: dict[str, Transport] = {}
        self.missing: dict[str, str] = {}
        self.outbox = Outbox(peers, lambda peer: self._step(peer, life.Wanted()))
        self._outfit = outfit
        self._loop = outfit.loop
        self._peers = peers
        self._greeter: Greeter

    def use(
        self, transports: Mapping[str, Transport], greeter: Greeter, surroundings: Surroundings
    ) -> None:
        """What to dial with, who shakes hands, and what this endpoint's own link needs."""
        self.transports = dict(transports)
        self._greeter = greeter
        link = loopback(surroundings)
        peer = self._peers.get(self.me.id)
        peer.because = "inproc: it is the same worker"
        link.authenticate()
        with self._peers.lock:
            self._peers.links[link.number] = link
            peer.machine.step(life.Proved(link.number, self.me.epoch), 0.0)
            self._attach(peer, link, self.me.epoch)

    def party(self) -> Party:
        """This side, for handshakes."""
        return Party(self.me.id, self.me.epoch)

    def want(self, peer: Peer) -> None:
        """Connect, with nothing to send: to learn of the peer's death."""
        with self._peers.lock:
            if peer.link is None:
                self._step(peer, life.Wanted())
        self._peers.deferred.run()

    def happened(self, peer: Peer, event: life.Event) -> None:
        """Take an event and do what it leads to."""
        with self._peers.lock:
            if not self.closing or isinstance(event, life.LinkLost):
                self._step(peer, event)
        self._peers.deferred.run()

    def _step(self, peer: Peer, event: life.Event) -> None:
        """Under the lock."""
        for command in peer.machine.step(event, time.monotonic()):
            self._carry_out(peer, command)

    def _carry_out(self, peer: Peer, command: life.Command) -> None:
        links = self._peers.links
        match command:
            case life.Resolve(fresh):
                self._resolve(peer, fresh=fresh)
            case life.Dial(epoch):
                self._dial(peer, epoch)
            case life.RetryAt(when):
                self._loop.call_later(
                    when - time.monotonic(), lambda: self.happened(peer, life.RetryDue())
                )
            case life.Accept(number):
                self._greeter.welcome(links[number])
            case life.Refuse(number, code):
                self._greeter.refuse(links[number], code, peer.machine.epoch, self.me.id)
            case life.Drop(number, reason):
                if number in links:
                    links[number].close(reason)
            case life.Ping(number):
                if number in links:
                    links[number].send(Outgoing(PING))
            case life.Up(number, epoch):
                self._up(peer, links[number], epoch)
            case life.Down():
                self._down(peer, command)
            case life.Fail(reason, error):
                self._fail(peer, reason, error)

    def _resolve(self, peer: Peer, *, fresh: bool) -> None:
        found = self._outfit.find(peer.id, fresh)

        def resolved() -> None:
            error = found.exception()
            if error is not None:
                self.happened(peer, life.Unresolved(error))
                return
            peer.record = found.result(0.0)
            self.happened(peer, life.Resolved(peer.record.epoch))

        if found.done():
            self._peers.deferred.add(resolved)
        else:
            found.add_done_callback(lambda _: self._loop.post(resolved))

    def _dial(self, peer: Peer, epoch: int) -> None:
        record = peer.record
        assert record is not None
        addresses = {address.scheme: address for address in record.addresses}
        available = {n for n, t in self.transports.items() if t.scheme in addresses}
        try:
            choice = self._choose(peer, record, available)
            peer.because = choice.because
            peer.tried.add(choice.transport)
            transport = self.transports[choice.transport]
            link = transport.dial(addresses[transport.scheme])
        except (OSError, CommError) as error:
            failed = life.DialFailed(0, error, final=isinstance(error, NoTransport))
            self._peers.deferred.add(functools.partial(self.happened, peer, failed))
            return
        self._peers.links[link.number] = link
        self._peers.by_link[link.number] = peer
        peer.machine.dialled(link.number)
        self._greeter.dial(link, Party(peer.id, epoch))

    def _choose(self, peer: Peer, record: WorkerRecord, available: set[str]) -> Choice:
        """The best transport that has not failed to connect; once all have, the best again."""
        priority = self._outfit.priority
        theirs = dict.fromkeys(self.transports, f"{peer.id} does not listen on it")
        tried = dict.fromkeys(peer.tried, "did not connect")
        reasons = theirs | tried | self.missing
        try:
            return choose(self.me, record, available - peer.tried, priority, reasons)
        except NoTransport:
            if not peer.tried:
                raise
        peer.tried.clear()
        return choose(self.me, record, available, priority, reasons)

    def _up(self, peer: Peer, link: Link, epoch: int) -> None:
        if not link.dialled:
            peer.because = f"{link.transport}: the peer chose"
        self._attach(peer, link, epoch)
        self.outbox.flush(peer)
        if peer.because != peer.said:
            peer.said = peer.because
            log.info("%s - %s over %s", self.me.id, peer.id, peer.because)
        self._peers.deferred.add(lambda: self._outfit.upward.connected(link, peer))

    def _attach(self, peer: Peer, link: Link, epoch: int) -> None:
        link.peer, link.epoch, link.state = peer.id, epoch, peer
        peer.begin(Window(self._outfit.window_bytes))
        link.bind(peer.window)
        peer.link = link
        peer.down = None
        peer.asked = False
        peer.tried.clear()
        self._peers.by_link[link.number] = peer

    def _down(self, peer: Peer, down: life.Down) -> None:
        peer.link = None
        if down.idle:
            if peer.waiting:
                self._step(peer, life.Wanted())
        else:
            peer.down = down
            self._fail_waiting(peer, lost_error(peer.id, down.epoch, down.reason))
        if not self.closing:
            self._peers.deferred.add(lambda: self._outfit.upward.disconnected(peer, down))

    def _fail(self, peer: Peer, reason: str, error: BaseException | None) -> None:
        failure = error or lost_error(peer.id, peer.epoch(), reason)
        self._fail_waiting(peer, failure)
        self._peers.deferred.add(lambda: self._outfit.upward.unreachable(peer, failure))

    def _fail_waiting(self, peer: Peer, error: BaseException) -> None:
        failed, peer.waiting = peer.waiting, deque()
        for frame in failed:
            if frame.cares is not None:
                self._peers.deferred.add(functools.partial(frame.cares.set_error, error))

    # -- idle and end --------------------------------------------------------------------------

    def close_idle(self, is_needed: Callable[[WorkerId], bool]) -> None:
        """Close the connections nobody has used since the last call."""
        with self._peers.lock:
            for peer in self._peers.all():
                seen, peer.seen = peer.seen, peer.sent + peer.received
                link = peer.link
                if link is None or peer.waiting or link.queued() or peer.id == self.me.id:
                    continue
                if seen == peer.seen and not is_needed(peer.id):
                    self.retire(peer, link)
        self._peers.deferred.run()

    def retire(self, peer: Peer, link: Link) -> None:
        """Send no more on this link; the peer answers in kind. Under the lock."""
        link.send(Outgoing(IDLE))
        self._step(peer, life.LinkLost(link.number, "idle", clean=True, idle=True))

    def say_goodbye(self) -> None:
        """No new connections; tell every peer that this is the end."""
        with self._peers.lock:
            self.closing = True
            for peer in self._peers.all():
                if peer.link is not None:
                    peer.link.send(Outgoing(BYE))
        self._peers.deferred.run()

    def close(self, error: BaseException) -> None:
        """Drop all links; what waits fails with this error."""
        for link in list(self._peers.links.values()):
            link.close("this endpoint was closed")
        with self._peers.lock:
            for peer in self._peers.all():
                self._fail_waiting(peer, error)
        self._peers.deferred.run()

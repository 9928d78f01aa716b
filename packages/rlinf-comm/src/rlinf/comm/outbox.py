"""Outbox: frames on their way out, from any thread."""

import functools
from collections import deque
from collections.abc import Callable

from rlinf.comm.errors import CommError
from rlinf.comm.frame import CREDIT, MESSAGE, WANT, Outgoing
from rlinf.comm.peers import Peer, Peers
from rlinf.comm.transports.base import Link


class Outbox:
    """Sends at once where that is possible, else keeps frames with their peer until it is.

    Args:
        peers: The peers, and the lock.
        connect: Called under the lock for a peer that has something waiting and no connection.
    """

    def __init__(self, peers: Peers, connect: Callable[[Peer], None]) -> None:
        self._peers = peers
        self._lock = peers.lock
        self._deferred = peers.deferred
        self._connect = connect

    def try_small(self, peer: Peer, tag: int, flags: int, header: bytes) -> bool:
        """Send a message without buffers if it can be sent now; else nothing has happened."""
        link = peer.link
        if link is None:
            return False
        nbytes = len(header)
        with self._lock:
            if peer.waiting or not peer.window.take(nbytes):
                return False
            sent = link.send_small(tag, flags, header)
            if sent:
                peer.sent += 1
                peer.sent_bytes += nbytes
        if self._deferred.actions:
            self._deferred.run()
        return sent

    def try_post(self, peer: Peer, frame: Outgoing) -> bool:
        """Send if it can be sent now; else nothing has happened.

        Raises:
            PoolExhausted: There never will be room for it.
        """
        link = peer.link
        if link is None or (frame.buffers and not link.stage(frame)):
            return False
        with self._lock:
            sent = self._try(peer, frame)
        if self._deferred.actions:
            self._deferred.run()
        return sent

    def post(self, peer: Peer, frame: Outgoing) -> None:
        """Send now, or as soon as there is a connection and room in the peer's window.

        Raises:
            PoolExhausted: There never will be room for it.
        """
        link = peer.link
        ready = link is None or not frame.buffers or link.stage(frame)
        with self._lock:
            if not (ready and self._try(peer, frame)):
                if frame.done is None:
                    frame.own()
                peer.waiting.append(frame)
                if peer.link is None:
                    self._connect(peer)
                else:
                    self.flush(peer)
        self._deferred.run()

    def reply(self, link: Link, peer: Peer, frame: Outgoing) -> None:
        """Answer on the link a request came by, or by another to the same incarnation."""
        if (not frame.buffers or link.stage(frame)) and link.send(frame):
            self._deferred.run()
            return
        with self._lock:
            if peer.link is not None and peer.link.epoch == link.epoch:
                frame.own()
                peer.waiting.append(frame)
                self.flush(peer)
        self._deferred.run()

    def credit(self, peer: Peer) -> None:
        """Tell a peer at once what was received of what it sent."""
        link = peer.link
        if link is not None:
            link.send(Outgoing(CREDIT))
            self._deferred.run()

    def flush(self, peer: Peer) -> None:
        """Send what waits and can go; under the lock."""
        link = peer.link
        if link is None:
            return
        kept: deque[Outgoing] = deque()
        blocked = peer.window.refused = False
        while peer.waiting:
            frame = peer.waiting.popleft()
            if frame.cares is not None and frame.cares.done():
                continue
            message = frame.kind == MESSAGE
            if (message and blocked) or not self._stage(link, frame):
                kept.append(frame)
            elif message and not peer.window.take(frame.nbytes):
                blocked = True
                kept.append(frame)
            elif not link.send(frame):
                kept.append(frame)
            blocked = blocked or (message and bool(kept))
        peer.waiting = kept
        if not kept:
            peer.asked = False
        elif not peer.asked:
            peer.asked = True
            link.send(Outgoing(WANT))

    def flush_all(self) -> None:
        """There is room in a transport's memory: what waited for it may go on."""
        with self._lock:
            for peer in self._peers.all():
                if peer.waiting and peer.link is not None:
                    self.flush(peer)
        self._deferred.run()

    def is_busy(self) -> bool:
        """Whether a message is still to leave (calls are not waited for: nobody hears them)."""
        with self._lock:
            return any(link.queued() for link in self._peers.links.values()) or any(
                frame.kind == MESSAGE and not (frame.cares is not None and frame.cares.done())
                for peer in self._peers.all()
                for frame in peer.waiting
            )

    def _try(self, peer: Peer, frame: Outgoing) -> bool:
        link = peer.link
        if link is None or (frame.buffers and not link.stage(frame)):
            return False  # staged before, as a rule; unless the link has only just come up
        if frame.kind == MESSAGE and (peer.waiting or not peer.window.take(frame.nbytes)):
            return False
        return link.send(frame)

    def _stage(self, link: Link, frame: Outgoing) -> bool:
        """For a frame nobody stands by: an error goes to its handle."""
        try:
            return not frame.buffers or link.stage(frame)
        except CommError as error:
            if frame.cares is not None:
                self._deferred.add(functools.partial(frame.cares.set_error, error))
            return False

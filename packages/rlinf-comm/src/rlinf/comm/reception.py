"""Reception: what links report. Handshakes, credit, goodbyes; payload goes up to the endpoint."""

from rlinf.comm import lifecycle as life
from rlinf.comm.errors import AuthenticationError, CommError, StaleEpoch
from rlinf.comm.frame import BYE, CREDIT, IDLE, PAYLOAD, WANT, Incoming, Outgoing
from rlinf.comm.handshake import Party, Refusal
from rlinf.comm.manager import ConnectionManager, Upward
from rlinf.comm.peers import Peer, Peers, lost_error
from rlinf.comm.progress import Loop
from rlinf.comm.shake import Greeter
from rlinf.comm.transports.base import Link


class Reception:
    """The `LinkOwner` of an endpoint's links, and the `Outcome` of their handshakes.

    Everything here is called on the dispatching thread.
    """

    def __init__(self, peers: Peers, manager: ConnectionManager, upward: Upward) -> None:
        self._peers = peers
        self._by_link = peers.by_link
        self._manager = manager
        self._upward = upward
        self.greeter: Greeter

    def begin(self, token: bytes, loop: Loop, timeout_s: float) -> None:
        """From now on peers may come."""
        self.greeter = Greeter(self._manager.party, token, self, loop, timeout_s)

    # -- what links report ---------------------------------------------------------------------

    def on_accept(self, link: Link) -> None:
        """A peer has dialled."""
        with self._peers.lock:
            self._peers.links[link.number] = link
        self.greeter.accept(link)

    def on_open(self, link: Link) -> None:
        """A link of ours is connected."""
        with self._peers.lock:  # whoever dialled may not be done with noting it
            self.greeter.opened(link)

    def on_frame(self, link: Link, frame: Incoming) -> None:
        """Sort a frame: payload goes up, the rest is for us."""
        peer = link.state
        if not isinstance(peer, Peer):
            self.greeter.frame(link, frame)
            return
        if frame.kind in PAYLOAD:
            self._upward.payload(link, peer, frame)
        elif frame.kind == WANT:
            peer.window.eager = True
            link.send(Outgoing(CREDIT))
        elif frame.kind == BYE:
            link.clean = True
        elif frame.kind == IDLE:
            self._idle(peer, link)

    def on_credit(self, link: Link) -> None:
        """What waited for the peer to receive something may go on."""
        peer = link.state
        if isinstance(peer, Peer) and peer.link is link:
            with self._peers.lock:
                self._manager.outbox.flush(peer)
            self._peers.deferred.run()

    def on_room(self) -> None:
        """What waited for room in a transport's memory may go on."""
        self._manager.outbox.flush_all()

    def on_lost(self, link: Link, reason: str) -> None:
        """A link is gone."""
        # Arrays keep no company a garbage collector sees: a frame of what came over this link, held
        # by it, would keep both for ever.
        unsent, link.unsent = link.unsent, []
        with self._peers.lock:
            self._peers.links.pop(link.number, None)
        if self.greeter.lost(link, reason):
            self._by_link.pop(link.number, None)
            return
        peer = self._by_link.pop(link.number, None)
        if peer is None:
            return
        said = "it closed its endpoint" if link.clean else reason
        self._manager.happened(peer, life.LinkLost(link.number, said, link.clean))
        error = lost_error(peer.id, link.epoch, said)
        for frame in unsent:
            if frame.cares is not None:
                frame.cares.set_error(error)

    def _idle(self, peer: Peer, link: Link) -> None:
        """The peer sends no more on this link: answer in kind, then whoever hears last closes."""
        with self._peers.lock:
            if peer.link is link:
                self._manager.retire(peer, link)
            else:
                link.close("idle")
        self._peers.deferred.run()

    # -- outcomes of handshakes ----------------------------------------------------------------

    def proved(self, link: Link, peer: Party) -> None:
        """A peer that dialled us is who it says."""
        if self._manager.closing:
            me = self._manager.me
            self.greeter.refuse(link, Refusal.CLOSING, me.epoch, me.id)
            return
        self._manager.happened(self._peers.get(peer.id), life.Proved(link.number, peer.epoch))

    def welcomed(self, link: Link, epoch: int) -> None:
        """The peer we dialled has accepted."""
        self._manager.happened(self._by_link[link.number], life.Welcomed(link.number, epoch))

    def refused(self, link: Link, code: Refusal, text: str) -> None:
        """The peer we dialled has refused."""
        peer = self._by_link[link.number]
        error: CommError | None = None
        if code is Refusal.TOKEN:
            error = AuthenticationError(text, peer=peer.id)
        elif code is Refusal.STALE:
            error = StaleEpoch(text, peer=self._manager.me.id)
        if error is not None:
            self._manager.happened(peer, life.DialFailed(link.number, error, final=True))
        else:
            self._manager.happened(peer, life.Refused(link.number, code, text))

    def failed(self, link: Link, error: BaseException, *, final: bool) -> None:
        """The link we dialled came to nothing."""
        self._manager.happened(
            self._by_link[link.number], life.DialFailed(link.number, error, final)
        )

"""Desk: where a thread receives that reads a link itself, past the mailbox."""

from threading import get_ident

from rlinf.comm.bundle import untie
from rlinf.comm.frame import Incoming
from rlinf.comm.ledger import Ledger
from rlinf.comm.mailbox import Mailbox
from rlinf.comm.peers import Peer
from rlinf.comm.progress import Loop
from rlinf.comm.transports.base import Link


class MessageDesk:
    """The `Desk` of an endpoint; thread-safe."""

    def __init__(self, mailbox: Mailbox, ledger: Ledger, loop: Loop) -> None:
        self._mailbox = mailbox
        self._sinks = ledger.sinks
        self._loop = loop

    def is_free(self, tag: int) -> bool:
        """Whether the next message of this tag may go past the mailbox, the sinks and the loop."""
        mailbox = self._mailbox
        return not (
            tag in mailbox.letters
            or tag in mailbox.wishes
            or self._sinks
            or self._loop.leader == get_ident()
        )

    def first(self, link: Link, frame: Incoming) -> Incoming:
        """The first message of a bundle; the others go into the mailbox."""
        peer = link.state
        assert isinstance(peer, Peer)
        frame.source, frame.window = peer.id, link.window
        frame.unfold(untie(frame.header))
        one = frame.split()
        if frame.rest:
            link.window.kept += len(frame.rest)
            link.window.kept_bytes += frame.nbytes
            self._mailbox.deliver(frame)
        return one

"""Inspection: what an endpoint tells whoever looks at its connections."""

import functools
import time
from dataclasses import asdict, dataclass
from typing import Final

from rlinf.comm.address import WorkerId
from rlinf.comm.caller import Caller
from rlinf.comm.exchange import Exchange
from rlinf.comm.handle import Handle
from rlinf.comm.lifecycle import Phase
from rlinf.comm.peers import Peer, Peers
from rlinf.comm.request import Request

CONNECTIONS: Final = "rlinf.connections"
ECHO: Final = "rlinf.echo"
ECHO_S: Final = 1.0
"""How long a peer may take to answer before its latency is not told."""


@dataclass(frozen=True, slots=True)
class View:
    """A connection, or the attempt at one, as one of its ends sees it.

    Attributes:
        peer: Who is at the other end.
        transport: What carries it; empty while there is none.
        because: Why that.
        state: up, absent, resolving, dialling or pausing.
        sent_bytes, received_bytes: Payload, headers included, since the endpoint was made.
        waiting: Messages that cannot be sent yet.
        latency_s: There and back of an empty call just now; None where nobody answered in time.
    """

    peer: str
    transport: str
    because: str
    state: str
    sent_bytes: int
    received_bytes: int
    waiting: int
    latency_s: float | None = None


class Inspection:
    """Serves `CONNECTIONS`: the request's payload is ignored, the reply a list of views as dicts.

    Args:
        exchange: Where to serve.
        peers: What to tell of.
        caller: To measure latency with.
    """

    def __init__(self, exchange: Exchange, peers: Peers, caller: Caller) -> None:
        self._peers = peers
        self._caller = caller
        exchange.services.add(ECHO, lambda request: request.reply())
        exchange.services.add(CONNECTIONS, self._serve)

    def views(self) -> list[View]:
        """All connections but that to oneself, without latency."""
        return [
            _view(peer)
            for peer in self._peers.all()
            if peer.id != self._caller.me
            and (peer.machine.phase is not Phase.ABSENT or peer.waiting or peer.sent_bytes)
        ]

    def _serve(self, request: Request) -> None:
        """On the dispatching thread: ask everybody, answer when the last has answered."""
        views = {view.peer: asdict(view) for view in self.views()}
        asked = [name for name, view in views.items() if view["state"] == "up"]
        left = len(asked)

        def note(name: str, begun: float, handle: Handle[object]) -> None:
            nonlocal left
            if handle.exception() is None:
                views[name]["latency_s"] = time.monotonic() - begun
            left -= 1
            if not left:
                request.reply(list(views.values()))

        if not asked:
            request.reply(list(views.values()))
        for name in asked:
            begun = time.monotonic()
            handle = self._caller.ask(ECHO, None, WorkerId.parse(name), ECHO_S)
            handle.add_done_callback(functools.partial(note, name, begun))


def _view(peer: Peer) -> View:
    link = peer.link
    return View(
        peer.name,
        "" if link is None else link.transport,
        peer.because,
        peer.machine.phase.name.lower(),
        peer.sent_bytes,
        peer.received_bytes,
        len(peer.waiting),
    )

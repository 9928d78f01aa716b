"""Ledger: what an endpoint has sent and received, and who wants to hear of it."""

import logging
import time
from dataclasses import dataclass

from rlinf.comm.address import WorkerId
from rlinf.comm.events import Event, Received, Sent, Sink
from rlinf.comm.frame import NAMES, Incoming
from rlinf.comm.peers import Peer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Totals since the endpoint was made."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0


class Ledger:
    """See the module.

    Attributes:
        counters: Totals.
        sinks: Are told of every event.
    """

    def __init__(self, me: WorkerId) -> None:
        self.counters = Counters()
        self.sinks: list[Sink] = []
        self._me = me

    def emit(self, event: Event) -> None:
        """Tell the sinks; one that raises is reported and does not stop the others."""
        for sink in tuple(self.sinks):
            try:
                sink(event)
            except Exception:
                log.exception("%s: sink %r raised", self._me, sink)

    def sent(self, to: Peer, kind: int, tag: int, nbytes: int) -> None:
        """Note a frame that was handed over."""
        self.counters.sent += 1
        self.counters.sent_bytes += nbytes
        to.sent_bytes += nbytes
        if self.sinks:
            self.emit(Sent(to.id, 0, time.monotonic(), NAMES[kind], tag, nbytes))

    def received(self, source: Peer, epoch: int, frame: Incoming) -> None:
        """Note a frame that has come."""
        self.counters.received += 1
        self.counters.received_bytes += frame.nbytes
        source.received_bytes += frame.nbytes
        if self.sinks:
            at, what = time.monotonic(), NAMES[frame.kind]
            self.emit(Received(source.id, epoch, at, what, frame.tag, frame.nbytes))

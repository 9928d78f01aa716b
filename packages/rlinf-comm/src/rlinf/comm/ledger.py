"""Ledger: what an endpoint has sent and received, and who wants to hear of it."""

import logging
import threading
import time

from rlinf.comm.address import WorkerId
from rlinf.comm.events import Event, Received, Sent, Sink
from rlinf.comm.frame import NAMES, Incoming
from rlinf.comm.peers import Peer

log = logging.getLogger(__name__)


class Ledger:
    """See the module.

    Args:
        me: Whose.
        lock: Guards what is counted as sent.

    Attributes:
        sinks: Are told of every event.
    """

    def __init__(self, me: WorkerId, lock: threading.RLock) -> None:
        self.sinks: list[Sink] = []
        self._me = me
        self._lock = lock

    def emit(self, event: Event) -> None:
        """Tell the sinks; one that raises is reported and does not stop the others."""
        for sink in tuple(self.sinks):
            try:
                sink(event)
            except Exception:
                log.exception("%s: sink %r raised", self._me, sink)

    def sent(self, to: Peer, kind: int, tag: int, nbytes: int, count: int = 1) -> None:
        """Note a frame that was handed over, of so many messages."""
        with self._lock:
            to.sent += count
            to.sent_bytes += nbytes
        if self.sinks:
            self.tell_sent(to, kind, tag, nbytes)

    def tell_sent(self, to: Peer, kind: int, tag: int, nbytes: int) -> None:
        """The same, of what was counted already."""
        self.emit(Sent(to.id, 0, time.monotonic(), NAMES[kind], tag, nbytes))

    def received(self, source: Peer, epoch: int, frame: Incoming) -> None:
        """Note a frame that has come."""
        source.reported += len(frame.rest) if frame.rest else 1
        source.reported_bytes += frame.nbytes
        if self.sinks:
            at, what = time.monotonic(), NAMES[frame.kind]
            self.emit(Received(source.id, epoch, at, what, frame.tag, frame.nbytes))

"""inproc: between endpoints of one process. Messages are still encoded, and always copied."""

import functools
import threading
from collections.abc import Callable

import numpy as np

from rlinf.comm.address import Address
from rlinf.comm.frame import Incoming, Outgoing
from rlinf.comm.transports.base import Link, Surroundings, Transport

_listening: dict[str, "InprocTransport"] = {}
_lock = threading.Lock()


class InprocLink(Link):
    """One of the two ends; what is sent is posted to the other end's loop."""

    transport = "inproc"
    copies = True

    def __init__(self, surroundings: Surroundings, *, dialled: bool) -> None:
        super().__init__(surroundings.owner, dialled=dialled)
        self.loop = surroundings.loop
        self.memory = surroundings.memory
        self._deferred = surroundings.deferred
        self.other: InprocLink | None = None
        self._gone = False
        self._sending = threading.Lock()

    def send(self, frame: Outgoing) -> bool:
        """Copy the frame over to the other end."""
        other = self.other
        if self._gone or other is None or other._gone:
            return False
        with self._sending:
            credit = self.window.collect()
        arrived = Incoming(frame.kind, frame.tag, frame.ident, credit, frame.flags, frame.header)
        arrived.service, arrived.nbytes = frame.service, frame.nbytes
        if frame.buffers:
            arrived.buffers = [_copy(buffer, other.memory) for buffer in frame.buffers]
        other.loop.post(lambda: other._arrive(arrived))
        if frame.done is not None:
            self._deferred.add(functools.partial(frame.done.set_result, None))
        return True

    def queued(self) -> bool:
        """Never: what is sent has been handed over."""
        return False

    def close(self, reason: str) -> None:
        """Tell both ends."""
        if self._gone:
            return
        self._gone = True
        self.loop.post(lambda: self.owner.on_lost(self, reason))
        other = self.other
        if other is not None:
            other.loop.post(lambda: other._end("the peer closed the connection"))

    def _arrive(self, frame: Incoming) -> None:
        if self._gone:
            return
        if frame.credit:
            self.window.given += frame.credit
            if self.window.refused:
                self.owner.on_credit(self)
        self.owner.on_frame(self, frame)

    def _end(self, reason: str) -> None:
        if not self._gone:
            self._gone = True
            self.owner.on_lost(self, reason)


def _copy(buffer: memoryview, memory: Callable[[int], memoryview]) -> memoryview:
    copy = memory(buffer.nbytes)
    np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(buffer, np.uint8))
    return copy


def loopback(surroundings: Surroundings) -> InprocLink:
    """A link of an endpoint to itself."""
    link = InprocLink(surroundings, dialled=True)
    link.other = link
    return link


class InprocTransport(Transport):
    """Listens under its endpoint's name in a table of this process."""

    name = "inproc"
    scheme = "inproc"

    def listen(self) -> Address:
        """Enter the table."""
        with _lock:
            _listening[self.surroundings.name] = self
        return Address("inproc", path=self.surroundings.name)

    def dial(self, address: Address) -> Link:
        """Make both ends."""
        with _lock:
            target = _listening.get(address.path)
        if target is None:
            raise ConnectionRefusedError(f"nobody listens at {address} in this process")
        mine = InprocLink(self.surroundings, dialled=True)
        theirs = InprocLink(target.surroundings, dialled=False)
        mine.other, theirs.other = theirs, mine
        theirs.loop.post(lambda: theirs.owner.on_accept(theirs))
        mine.loop.post(lambda: mine.owner.on_open(mine))
        return mine

    def close(self) -> None:
        """Leave the table."""
        with _lock:
            if _listening.get(self.surroundings.name) is self:
                del _listening[self.surroundings.name]

    def abandon(self) -> None:
        """In a forked child: nobody of the parent's listens here. The lock may be held for ever."""
        _listening.pop(self.surroundings.name, None)

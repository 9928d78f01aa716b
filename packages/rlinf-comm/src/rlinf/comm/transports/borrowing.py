"""Borrowing: views on a peer's memory, and how they are given back."""

import itertools
import logging
import threading
import weakref
from collections import deque
from typing import Protocol

from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import PRIVATE, Incoming, Place
from rlinf.comm.pool import Bytes
from rlinf.comm.segment import ForeignSegment, faults

log = logging.getLogger(__name__)


class Returner(Protocol):
    """The link a borrowed view goes back by."""

    def gone(self, view: "View") -> None:
        """The last view is gone. Called by a finalizer: takes no locks."""

    def give_back(self, lease: int) -> None:
        """What was lent has been copied."""


class View(weakref.ref[Bytes]):
    """Tells when the last view on a received buffer is gone. Kept in `_living` until then."""

    __slots__ = ("faults", "lease", "length", "link", "offset", "segment")

    faults: int
    lease: int
    length: int
    link: Returner
    offset: int
    segment: ForeignSegment


_living: dict[int, View] = {}


def _gone(view: weakref.ref[Bytes]) -> None:
    assert isinstance(view, View)
    _living.pop(id(view), None)
    view.link.gone(view)


class Borrower:
    """The segments of one peer, and what of them is in use here.

    Attributes:
        held: How many buffers are in use.
        released: Views that are gone and not given back yet; filled by finalizers.
    """

    def __init__(self, link: Returner, out: threading.Lock) -> None:
        self.held = 0
        self.released: deque[View] = deque()
        self._link = link
        # Held while pages are reserved or given back; finalizers that meet it leave it at that.
        self._out = out
        self._segments: dict[int, ForeignSegment] = {}
        self._warned = False

    def attach(self, uid: int, fd: int, size: int) -> None:
        """The peer has passed a segment.

        Raises:
            ProtocolError: It is not what it should be.
        """
        self._segments[uid] = ForeignSegment.attach(uid, fd, size)

    def drop(self, uid: int) -> None:
        """The peer has closed a segment; it is unmapped once nothing of it is in use."""
        self._segments.pop(uid, None)

    def drop_all(self) -> None:
        """The peer is gone: what is in use stays, the rest is unmapped."""
        self._segments.clear()

    def fill(self, frame: Incoming, *, may_hold: bool) -> None:
        """Put the buffers that lie in shared memory among those that came inline.

        Args:
            frame: What has arrived.
            may_hold: False: copy everything.

        Raises:
            ProtocolError: A place is not in a segment of the peer's.
        """
        inline = iter(frame.buffers)
        private = bool(frame.flags & PRIVATE)
        if private and not self._warned:
            self._warn()
        buffers: list[memoryview] = []
        so_far = faults()
        for lease, places in itertools.groupby(frame.places, key=_lease):
            if not lease:
                buffers += [next(inline) for _ in places]
                continue
            together = list(places)
            segment, start, end = self._span(together)
            frame.nbytes += sum([length for _, _, length, _ in together])
            if private or not may_hold or not self._hold(segment, start, end - start):
                memory = segment.copy(start, end - start)
                self._link.give_back(lease)
            else:
                memory = self._view(segment, start, end - start, lease, so_far)
            buffers += [memory[offset - start : offset - start + n] for _, offset, n, _ in together]
        frame.buffers = buffers

    def _span(self, places: list[Place]) -> tuple[ForeignSegment, int, int]:
        """The segment of what is lent together, and from where to where it reaches."""
        uid = places[0][0]
        segment = self._segments.get(uid)
        start = min([offset for _, offset, _, _ in places])
        end = max([offset + length for _, offset, length, _ in places])
        if segment is None or end > segment.size or end == start:
            raise ProtocolError(f"a buffer at {start} to {end} of a segment that has none")
        if any(other != uid for other, _, _, _ in places):
            raise ProtocolError("buffers of several segments lent as one")
        return segment, start, end

    def settle(self) -> list[int]:
        """Let go of what is not in use any more; returns its leases. Under `_out`."""
        leases: list[int] = []
        places: dict[tuple[ForeignSegment, bool], list[tuple[int, int]]] = {}
        so_far = faults()
        while self.released:
            view = self.released.popleft()
            key = view.segment, view.faults != so_far
            places.setdefault(key, []).append((view.offset, view.length))
            leases.append(view.lease)
        for (segment, written), gone in places.items():
            segment.restore(gone, written=written)
        self.held -= len(leases)
        return leases

    def _hold(self, segment: ForeignSegment, offset: int, length: int) -> bool:
        with self._out:
            held = segment.hold(offset, length)
            self.held += held
            return held

    def _view(
        self, segment: ForeignSegment, offset: int, length: int, lease: int, so_far: int
    ) -> memoryview:
        array = segment.slice(offset, length)
        view = View(array, _gone)
        view.link, view.segment, view.lease = self._link, segment, lease
        view.offset, view.length, view.faults = offset, length, so_far
        _living[id(view)] = view
        return array.data

    def _warn(self) -> None:
        self._warned = True
        log.warning(
            "this process holds so much received memory that it now gets copies, which is slower: "
            "keep fewer received arrays, keep a copy() of the parts that are needed for long, or "
            "raise pool_bytes of the sender"
        )


def _lease(place: Place) -> int:
    return place[3]

"""Lending: what this endpoint has in shared memory, and which of it a peer holds."""

import itertools
import logging
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import DROP, PRIVATE, RELEASE, SEGMENT, Outgoing
from rlinf.comm.pool import Pool, too_much
from rlinf.comm.segment import ATLAS, PAGE, Segment, address_of
from rlinf.comm.transports.send_queue import Encoder, Entry

log = logging.getLogger(__name__)

SHARE = 2  # a receiver that holds more than 1/SHARE of the pool gets private copies
SMALL_BYTES = 1 << 18  # copying a smaller one costs less than finding where it lies
GROUP_BYTES = 1 << 20  # smaller ones share a place, up to this much together
LONG_BYTES = 1 << 18  # copying so much takes long enough to let other threads run
ALIGN = 64


class Placed(NamedTuple):
    """A buffer in shared memory; inline where `segment` is None.

    Attributes:
        keep: What keeps it there. Consecutive buffers with the same one are lent as one: until
            the receiver has let go of all of them.
        check: Its checksum where it is to be compared once it comes back (`debug_in_place`).
    """

    segment: Segment | None
    offset: int
    length: int
    keep: object
    check: int | None = None


class Loan(NamedTuple):
    """What a peer holds under one lease."""

    places: tuple[Placed, ...]
    nbytes: int


class Stock:
    """Puts buffers into shared memory; one an endpoint.

    Args:
        pool: Where to.
        inline_bytes: Buffers up to this size stay out of it.
        check: Whether to make checksums of buffers that are not copied.
    """

    def __init__(self, pool: Pool, inline_bytes: int, *, check: bool) -> None:
        self.pool = pool
        self.starved = False
        self._inline = inline_bytes
        self._check = check

    def place(self, buffers: Sequence[memoryview]) -> list[Placed] | None:
        """Write buffers into the pool; None where it is full at present (`starved` is set).

        Raises:
            PoolExhausted: A buffer is larger than the whole pool.
        """
        places: list[Placed] = []
        group: list[memoryview] = []
        grouped = 0
        for buffer in buffers:
            size = buffer.nbytes
            if group and (size <= self._inline or grouped + size > GROUP_BYTES):
                if not self._write(group, grouped, places):
                    return None
                group, grouped = [], 0
            if size <= self._inline:
                places.append(Placed(None, 0, size, None))
                continue
            lying = None
            if size >= SMALL_BYTES:
                lying = self._lying(buffer, size, places[-1] if places and not group else None)
            if lying is None:
                group.append(buffer)
                grouped += size + -size % ALIGN
                continue
            if group and not self._write(group, grouped, places):
                return None
            group, grouped = [], 0
            places.append(lying)
        if group and not self._write(group, grouped, places):
            return None
        return places

    def _lying(self, buffer: memoryview, size: int, before: Placed | None) -> Placed | None:
        """Where a buffer lies in shared memory already, if it shows there what its owner wrote.

        With the one `before` it is lent as one if they lie side by side in the same array.
        """
        address = address_of(buffer)
        segment = ATLAS.find(address, size)
        if segment is None or not segment.is_pristine(address - segment.address, size):
            return None
        place = Placed(segment, address - segment.address, size, buffer)
        if before is not None and _adjoins(before, place):
            place = place._replace(keep=before.keep)
        if segment.own and self._check:
            place = place._replace(check=checksum(place))
        return place

    def _write(self, group: list[memoryview], size: int, places: list[Placed]) -> bool:
        """Copy buffers into one place of the pool; False where it is full at present."""
        lent = self.pool.allocate(size)
        if lent is None:
            needed = sum([place.length for place in places if place.segment]) + size
            if needed > self.pool.limit:
                raise too_much(needed, self.pool.limit)
            self.starved = True
            return False
        start = 0
        memory = lent.array.data
        for buffer in group:
            size = buffer.nbytes
            if size < LONG_BYTES:
                memory[start : start + size] = buffer
            else:
                np.copyto(lent.array[start : start + size], np.frombuffer(buffer, np.uint8))
            places.append(Placed(lent.segment, lent.offset + start, size, lent.array))
            start += size + -size % ALIGN
        return True


class Lender(Encoder):
    """Encodes frames for one peer, with places for buffers, and remembers what is lent to it.

    Guarded by the link's `_out`.
    """

    def __init__(self, stock: Stock) -> None:
        super().__init__()
        self.lent_bytes = 0
        self._stock = stock
        self._numbers = itertools.count(1)
        self._lent: dict[int, Loan] = {}
        self._introduced: dict[int, weakref.ref[Segment]] = {}
        # Filled by finalizers, which may run anywhere and so must not take a lock.
        self._dropped: deque[int] = deque()

    def stage(self, frame: Outgoing) -> bool:
        """Put the frame's buffers into the pool, once for all peers. Needs no lock."""
        if frame.staged is not None or not frame.buffers:
            return True
        twin = frame.twin
        if twin is not None and twin.staged is not None:
            frame.staged = twin.staged
            return True
        places = self._stock.place(frame.buffers)
        frame.staged = places
        if twin is not None:
            twin.staged = places
        return places is not None

    def count(self, frame: Outgoing) -> int:
        """One descriptor a buffer."""
        return len(_places(frame))

    def inline(self, frame: Outgoing) -> Sequence[memoryview]:
        """The buffers that have no place."""
        rows = zip(frame.buffers, _places(frame), strict=True)
        return [buffer for buffer, place in rows if place.segment is None]

    def descriptors(self, frame: Outgoing) -> bytes:
        """Places; each is lent from now on."""
        numbers: list[int] = []
        lease = 0
        together: list[Placed] = []
        for place in _places(frame):
            segment, offset, length, keep, _ = place
            if segment is None:
                numbers += (0, 0, length, 0)
                continue
            if not together or together[-1].keep is not keep:
                self._lend(lease, together)
                lease, together = next(self._numbers), []
            together.append(place)
            numbers += (segment.uid, offset, length, lease)
        self._lend(lease, together)
        return struct.pack(f"<{len(numbers)}Q", *numbers)

    def _lend(self, lease: int, places: list[Placed]) -> None:
        if places:
            nbytes = sum([place.length for place in places])
            self._lent[lease] = Loan(tuple(places), nbytes)
            self.lent_bytes += nbytes

    def flags(self, frame: Outgoing) -> int:
        """Ask a receiver that has much to make copies."""
        return PRIVATE if self.lent_bytes * SHARE > self._stock.pool.limit else 0

    def before(self, frame: Outgoing) -> list[Entry]:
        """The segments the peer does not know yet."""
        entries = []
        last: Segment | None = None
        for place in _places(frame):
            segment = place.segment
            if segment is None or segment is last:
                continue
            last = segment
            if segment.uid in self._introduced:
                continue
            uid = segment.uid
            self._introduced[uid] = weakref.ref(segment, self._dropper(uid))
            head = Outgoing(SEGMENT, struct.pack("<Q", segment.size), ident=uid)
            entry = Entry(self.head(head), head, True)
            entry.fd, entry.keep = segment.fd, segment
            entries.append(entry)
        return entries

    def drops(self) -> Outgoing | None:
        """The frame that tells the peer of segments that are no more."""
        uids = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for uid in uids:
            del self._introduced[uid]
        return Outgoing(DROP, struct.pack(f"<{len(uids)}Q", *uids)) if uids else None

    def take_back(self, leases: Sequence[int]) -> list[Loan]:
        """The peer has returned these; whoever called lets go of them once outside the lock."""
        back = [self._lent.pop(lease) for lease in leases if lease in self._lent]
        self.lent_bytes -= sum([loan.nbytes for loan in back])
        return back

    def take_all(self) -> list[Loan]:
        """The peer has nothing any more."""
        back, self._lent, self.lent_bytes = list(self._lent.values()), {}, 0
        return back

    def has_lent(self) -> bool:
        """Whether the peer has anything."""
        return bool(self._lent)

    def _dropper(self, uid: int) -> Callable[[weakref.ref[Segment]], None]:
        return lambda _: self._dropped.append(uid)


def inspect(back: Sequence[Loan], peer: object) -> None:
    """Report what was changed by its owner while it was lent (`debug_in_place`)."""
    for place in (place for loan in back for place in loan.places):
        if place.check is not None and place.check != checksum(place):
            log.error(
                "%d bytes from Endpoint.empty were changed while %s still had them: wait for "
                "its answer before writing again, or send a copy()",
                place.length,
                peer,
            )


def _adjoins(before: Placed, place: Placed) -> bool:
    """Whether two buffers are neighbours in one array; each keeps all of it in place anyway."""
    one, other = before.keep, place.keep
    if not (isinstance(one, memoryview) and isinstance(other, memoryview)):
        return False
    gap = place.offset - before.offset - before.length
    return one.obj is other.obj and before.segment is place.segment and 0 <= gap < PAGE


def checksum(place: Placed) -> int:
    """Of what lies at a place now."""
    assert place.segment is not None
    return zlib.crc32(place.segment.slice(place.offset, place.length).data)


def _places(frame: Outgoing) -> Sequence[Placed]:
    return frame.staged or ()  # type: ignore[return-value]


def release(leases: Sequence[int]) -> Outgoing:
    """The frame that gives these back."""
    return Outgoing(RELEASE, struct.pack(f"<{len(leases)}Q", *leases))


def numbers_of(data: bytes) -> tuple[int, ...]:
    """The numbers in such a frame.

    Raises:
        ProtocolError: It is cut off.
    """
    if len(data) % 8:
        raise ProtocolError("a list of numbers that is cut off")
    return struct.unpack(f"<{len(data) // 8}Q", data)

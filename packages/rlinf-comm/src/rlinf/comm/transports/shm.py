"""shm: between processes of one host. Headers over a Unix socket, buffers in shared memory.

The sender writes a buffer once, into its pool, and passes the pool's segments to each peer once
(memfd over SCM_RIGHTS). A buffer that already lies in a segment this process has mapped is not
written at all: one from `Endpoint.empty`, or one that came from another peer and is passed on.

A place stays lent until the receiver's last view on it is gone; then its lease is given back
(RELEASE). If a peer's socket closes, it holds no views any more: whoever still has views on a
peer's memory keeps the socket open, even after the endpoint is closed.

Receivers own what they receive: see `segment` for how that is done without a copy.
"""

import contextlib
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlinf.comm import segment as segments
from rlinf.comm.address import Address
from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import DROP, END, PLACED, PRIVATE, RELEASE, SEGMENT, Incoming, Outgoing
from rlinf.comm.pool import Bytes, Pool
from rlinf.comm.segment import ATLAS, ForeignSegment, Segment, address_of
from rlinf.comm.timers import Timer
from rlinf.comm.transports.base import Link, Surroundings, Transport
from rlinf.comm.transports.stream import Entry, StreamLink

log = logging.getLogger(__name__)

BACKLOG = 1024
MAX_FDS = 16
HURRY_BYTES = 1 << 16
SHARE = 2  # a receiver that holds more than 1/SHARE of the pool gets private copies
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4) if hasattr(socket, "CMSG_SPACE") else 0


class Placed(NamedTuple):
    """A buffer in shared memory, and what keeps it there; inline where `segment` is None.

    `check` is its checksum where it is to be compared once it comes back (`debug_in_place`).
    """

    segment: Segment | None
    offset: int
    length: int
    keep: object
    check: int | None = None


class _View(weakref.ref[Bytes]):
    """Tells when the last view on a received buffer is gone. Kept in `_living` until then."""

    __slots__ = ("lease", "length", "link", "offset", "segment")

    lease: int
    length: int
    link: "ShmLink"
    offset: int
    segment: ForeignSegment


_living: dict[int, _View] = {}


class ShmLink(StreamLink):
    """A Unix socket and the segments passed over it."""

    transport = "shm"
    placed = True
    copies = True

    def __init__(
        self,
        sock: socket.socket,
        surroundings: Surroundings,
        transport: "ShmTransport",
        *,
        dialled: bool,
    ) -> None:
        self._transport = transport
        self._fds: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._lent: dict[int, Placed] = {}
        self._lent_bytes = 0
        self._introduced: dict[int, weakref.ref[Segment]] = {}
        self._dropped: deque[int] = deque()
        self._segments: dict[int, ForeignSegment] = {}
        self._released: deque[_View] = deque()
        self._settling = threading.Lock()
        self._held = 0
        self._warned = False
        self._ending = False
        self._finished_reading = False
        # Connecting to a Unix socket is done at once, but `on_open` is to come later.
        super().__init__(sock, surroundings, dialled=dialled, connecting=dialled)

    # -- sending -------------------------------------------------------------------------------

    def stage(self, frame: Outgoing) -> bool:
        """Put the frame's buffers into the pool, once for all links of this endpoint."""
        if frame.staged is not None or not frame.buffers:
            return True
        twin = frame.twin
        if twin is not None and twin.staged is not None:
            frame.staged = twin.staged
            return True
        places = self._transport.place(frame.buffers)
        frame.staged = places
        if twin is not None:
            twin.staged = places
        return places is not None

    def _places(self, frame: Outgoing) -> Sequence[Placed]:
        return frame.staged or ()  # type: ignore[return-value]

    def _inline(self, frame: Outgoing) -> Sequence[memoryview]:
        if not frame.buffers:
            return ()
        if frame.staged is None and not self.stage(frame):
            raise BufferError("a frame was sent before there was room for it")
        return [
            buffer
            for buffer, place in zip(frame.buffers, self._places(frame), strict=True)
            if place.segment is None
        ]

    def _introduce(self, frame: Outgoing) -> None:
        for place in self._places(frame):
            segment = place.segment
            if segment is None or segment.uid in self._introduced:
                continue
            uid = segment.uid
            self._introduced[uid] = weakref.ref(segment, self._dropper(uid))
            head = Outgoing(SEGMENT, struct.pack("<Q", segment.size), ident=uid)
            entry = Entry(self._encode(head), head, True, (segment.fd,))
            entry.keep = segment
            self._wire.append(entry)

    def _dropper(self, uid: int) -> Callable[[weakref.ref[Segment]], None]:
        return lambda _: self._dropped.append(uid)

    def _descriptors(self, frame: Outgoing) -> bytes:
        rows = []
        for place in self._places(frame):
            if place.segment is None:
                rows.append(PLACED.pack(0, 0, place.length, 0))
                continue
            lease = next(self._numbers)
            self._lent[lease] = place
            self._lent_bytes += place.length
            rows.append(PLACED.pack(place.segment.uid, place.offset, place.length, lease))
        return b"".join(rows)

    def _flags(self, frame: Outgoing) -> int:
        much = self._lent_bytes * SHARE > self._transport.pool.limit
        return PRIVATE if much and frame.staged else 0

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self, room: memoryview) -> int:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        count, ancillary, _, _ = self._socket.recvmsg_into([room], _ANCILLARY, flags)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
        return count

    def _report(self, frame: Incoming) -> None:
        if frame.kind == SEGMENT:
            self._attach(frame)
        elif frame.kind == RELEASE:
            self._back(frame)
        elif frame.kind == END:
            self.close("the peer closed the connection")
        elif frame.kind == DROP:
            for (uid,) in struct.iter_unpack("<Q", frame.header):
                self._segments.pop(uid, None)
        elif not self._ending:
            if frame.places:
                self._find(frame)
            self.owner.on_frame(self, frame)
        if self._ending:
            self._end_if_free()

    def _back(self, frame: Incoming) -> None:
        back = []
        with self._out:
            for (lease,) in struct.iter_unpack("<Q", frame.header):
                place = self._lent.pop(lease, None)
                if place is not None:
                    self._lent_bytes -= place.length
                    back.append(place)
        for place in back:
            if place.check is not None and place.check != _checksum(place):
                log.error(
                    "%d bytes from Endpoint.empty were changed while %s still had them: wait for "
                    "its answer before writing again, or send a copy()",
                    place.length,
                    self.peer,
                )
        back.clear()
        self._transport.freed()

    def _attach(self, frame: Incoming) -> None:
        if not self._fds or len(frame.header) != 8:
            raise ProtocolError("a segment without its descriptor")
        (size,) = struct.unpack("<Q", frame.header)
        self._segments[frame.ident] = ForeignSegment.attach(frame.ident, self._fds.popleft(), size)

    def _find(self, frame: Incoming) -> None:
        """Put the buffers that lie in shared memory among those that came inline."""
        if self._released:
            self.settle()
        inline = iter(frame.buffers)
        buffers: list[memoryview] = []
        for uid, offset, length, lease in frame.places:
            if not uid:
                buffers.append(next(inline))
                continue
            segment = self._segments.get(uid)
            if segment is None or offset + length > segment.size:
                raise ProtocolError(f"a buffer at {offset}+{length} of a segment that has none")
            frame.nbytes += length
            buffers.append(self._view(segment, offset, length, lease, frame.flags))
        frame.buffers = buffers

    def _view(
        self, segment: ForeignSegment, offset: int, length: int, lease: int, flags: int
    ) -> memoryview:
        if flags & PRIVATE and not self._warned:
            self._warned = True
            log.warning(
                "%s: this process holds so much received memory that it now gets copies, which "
                "is slower: keep fewer received arrays, keep a copy() of the parts that are "
                "needed for long, or raise pool_bytes of the sender",
                self.peer,
            )
        if flags & PRIVATE or not length or not self._hold(segment, offset, length):
            copy = segment.copy(offset, length)
            self.send(Outgoing(RELEASE, struct.pack("<Q", lease)))
            return copy
        array = segment.slice(offset, length)
        view = _View(array, _gone)
        view.link, view.segment, view.lease = self, segment, lease
        view.offset, view.length = offset, length
        _living[id(view)] = view
        return array.data

    def _hold(self, segment: ForeignSegment, offset: int, length: int) -> bool:
        with self._out:  # which keeps `settle` out, in this thread's finalizers too
            if self._gone:
                return False
            held = segment.hold(offset, length)
            self._held += held
            return held

    # -- giving back ---------------------------------------------------------------------------

    def gone(self, view: _View) -> None:
        """The last view on a received buffer is gone. Called by a finalizer: takes no locks."""
        self._released.append(view)
        if view.length >= HURRY_BYTES or self._ending:
            self.settle()
        elif len(self._released) == 1:
            self._loop.post(self.settle)

    def settle(self) -> None:
        """Make released memory the sender's again, and tell it. Never blocks."""
        if not self._settling.acquire(blocking=False):
            return  # whoever is at it looks again before it is done
        try:
            while self._released and self._out.acquire(blocking=False):
                try:
                    self._give_back()
                finally:
                    self._out.release()
        finally:
            self._settling.release()

    def _give_back(self) -> None:
        leases = []
        while self._released:
            view = self._released.popleft()
            view.segment.restore(view.offset, view.length)
            leases.append(view.lease)
        self._held -= len(leases)
        if self._finished_reading:
            self._let_go()
        elif not self._gone:
            self._post(Outgoing(RELEASE, struct.pack(f"<{len(leases)}Q", *leases)))
            if self._ending:
                self._loop.post(self._end_if_free)

    def _post(self, frame: Outgoing) -> None:
        """Queue a frame of ours; under `_out`."""
        self._small.append(frame)
        if not self._writing:
            self._flush()

    def drop_segments(self) -> None:
        """Tell the peer of segments that are no more, so that it unmaps them."""
        with self._out:
            if self._dropped and not self._gone:
                uids = [self._dropped.popleft() for _ in range(len(self._dropped))]
                for uid in uids:
                    del self._introduced[uid]
                self._post(Outgoing(DROP, struct.pack(f"<{len(uids)}Q", *uids)))

    def _let_out(self) -> None:
        if self._released:
            self.settle()

    def lent_bytes(self) -> int:
        """How much of this endpoint's memory the peer holds."""
        return self._lent_bytes

    # -- the end -------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the connection. The socket stays open while either side has the other's memory."""
        with self._out:
            if self._gone or self._ending:
                return
            if self._connecting or not (self._lent or self._held):
                self._close_socket()
            else:
                self._ending = True
                self._discard(keep_wire=True)
                self._post(Outgoing(END))
        self._loop.post(lambda: self.owner.on_lost(self, reason))

    def _eof(self, reason: str) -> None:
        """The peer's socket is closed: it has none of our memory any more."""
        with self._out:
            if self._gone:
                return
            told, self._ending = self._ending, True
            self._close_socket()
        self._forget()
        if not told:
            self._loop.post(lambda: self.owner.on_lost(self, reason))

    def _end_if_free(self) -> None:
        with self._out:
            if self._gone or self._lent or self._held:
                return
            self._close_socket()
        self._forget()

    def _forget(self) -> None:
        self._lent.clear()
        self._lent_bytes = 0
        while self._fds:
            os.close(self._fds.popleft())
        self._transport.forget(self)

    def finish(self) -> None:
        """The endpoint is closed, its loop stands still: keep the socket for the views alone."""
        with self._out:
            if self._gone:
                return
            self._gone = self._finished_reading = True
            self._loop.poller.unregister(self._fd)
            self._let_go()
        self._forget()

    def _let_go(self) -> None:
        if not self._held and self._socket.fileno() >= 0:
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child: views on memory live on, but the parent alone gives them back."""
        self._finished_reading = False
        super().abandon()


def _gone(view: weakref.ref[Bytes]) -> None:
    assert isinstance(view, _View)
    _living.pop(id(view), None)
    view.link.gone(view)


class ShmTransport(Transport):
    """Listens on an abstract Unix socket; owns the pool."""

    name = "shm"
    scheme = "unix"

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self.pool = Pool(surroundings.config.pool_bytes)
        self._socket: socket.socket | None = None
        self._links: dict[int, ShmLink] = {}
        self._starved = False
        self._inline = surroundings.config.inline_bytes
        self._timer: Timer | None = None

    @classmethod
    def missing(cls) -> str | None:
        """Needs memfd, and a look at this process's page table."""
        return segments.missing()

    def listen(self) -> Address:
        """Bind a name nobody else has."""
        path = f"@rlinf-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + path[1:])
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self.surroundings.loop.poller.register(self._socket.fileno(), self._accept)
        self._tidy()
        return Address("unix", path=path)

    def dial(self, address: Address) -> Link:
        """Begin to connect."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect("\0" + address.path.removeprefix("@"))
        except OSError:
            sock.close()
            raise
        return self._link(sock, dialled=True)

    def place(self, buffers: Sequence[memoryview]) -> list[Placed] | None:
        """Write buffers into the pool; None where it is full at present.

        Raises:
            PoolExhausted: A buffer is larger than the whole pool.
        """
        places: list[Placed] = []
        for buffer in buffers:
            size = buffer.nbytes
            if size <= self._inline:
                places.append(Placed(None, 0, size, None))
                continue
            place = self._lying(buffer, size) or self._write(buffer, size)
            if place is None:
                self._starved = True
                return None
            places.append(place)
        return places

    def allocate(self, nbytes: int) -> memoryview | None:
        """A place in the pool to be filled by the user; None where it is full at present."""
        array = self.pool.allocate(nbytes)
        return None if array is None else array.data

    def shortage(self) -> str | None:
        """Who holds the pool, where a message could not be written for lack of room."""
        if not self._starved:
            return None
        now = self.pool.statistics()
        holders = ", ".join(
            f"{link.peer}: {link.lent_bytes()}"
            for link in list(self._links.values())
            if link.lent_bytes()
        )
        return (
            f"{now.used_bytes} of pool_bytes={now.limit_bytes} are in use, held by receivers: "
            f"{holders or 'none'}. Receivers give memory back when they drop what they received; "
            "raise pool_bytes, or keep less"
        )

    def freed(self) -> None:
        """A receiver has given something back."""
        if self._starved:
            self._starved = False
            self.surroundings.owner.on_room()

    def forget(self, link: ShmLink) -> None:
        """A link's socket is closed."""
        self._links.pop(link.number, None)
        self.freed()

    def close(self) -> None:
        """Stop listening; what receivers still hold stays theirs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self.surroundings.loop.poller.unregister(self._socket.fileno())
            self._socket.close()
        for link in list(self._links.values()):
            link.finish()

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors."""
        if self._socket is not None:
            self._socket.close()
        for link in list(self._links.values()):
            link.abandon()

    def _lying(self, buffer: memoryview, size: int) -> Placed | None:
        """Where a buffer lies in shared memory already, if it shows there what its owner wrote."""
        address = address_of(buffer)
        segment = ATLAS.find(address, size)
        if segment is None or not segment.is_pristine(address - segment.address, size):
            return None
        place = Placed(segment, address - segment.address, size, buffer)
        if segment.own and self.surroundings.config.debug_in_place:
            place = place._replace(check=_checksum(place))
        return place

    def _write(self, buffer: memoryview, size: int) -> Placed | None:
        array = self.pool.allocate(size)
        if array is None:
            return None
        np.copyto(array, np.frombuffer(buffer, np.uint8))
        segment = ATLAS.find(array.__array_interface__["data"][0], size)
        assert segment is not None
        address: int = array.__array_interface__["data"][0]
        return Placed(segment, address - segment.address, size, array)

    def _accept(self, _: int) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _peer = self._socket.accept()
                sock.setblocking(False)
                self.surroundings.owner.on_accept(self._link(sock, dialled=False))

    def _link(self, sock: socket.socket, *, dialled: bool) -> ShmLink:
        link = ShmLink(sock, self.surroundings, self, dialled=dialled)
        self._links[link.number] = link
        return link

    def _tidy(self) -> None:
        self.pool.trim()
        for link in list(self._links.values()):
            link.drop_segments()
        self._timer = self.surroundings.loop.call_later(
            self.surroundings.config.pool_idle_s, self._tidy
        )


def _checksum(place: Placed) -> int:
    assert place.segment is not None
    return zlib.crc32(place.segment.slice(place.offset, place.length).data)

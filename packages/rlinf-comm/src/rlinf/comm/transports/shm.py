"""shm: between processes of one host. Headers over a Unix socket, buffers in shared memory.

The sender writes a buffer once, into its pool, and passes the pool's segments to each peer once
(memfd over SCM_RIGHTS, see `side`). A buffer that already lies in a segment this process has mapped
is not written at all: one from `Endpoint.empty`, or one that came from another peer and is passed
on.

A place stays lent until the receiver's last view on it is gone; then its lease is given back
(RELEASE). If a peer's socket closes, it holds no views any more: whoever still has views on a
peer's memory keeps the socket open, even after the endpoint is closed.

Receivers own what they receive: see `segment` for how that is done without a copy.
"""

import contextlib
import secrets
import socket
import threading

from rlinf.comm import segment as segments
from rlinf.comm.address import Address
from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import DROP, END, MESSAGE, RELEASE, SEGMENT, SIDE, Incoming, Outgoing
from rlinf.comm.pool import Pool
from rlinf.comm.timers import Timer
from rlinf.comm.transports.base import Link, Surroundings, Transport
from rlinf.comm.transports.borrowing import Borrower, View
from rlinf.comm.transports.lending import Lender, Stock, inspect, numbers_of, release
from rlinf.comm.transports.side import Side
from rlinf.comm.transports.stream import StreamLink

BACKLOG = 1024
HURRY_BYTES = 8 << 20


class ShmLink(StreamLink):
    """A Unix socket and the segments passed over it, in both directions."""

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
        self._lender = Lender(transport.stock)
        self._side: Side | None = None
        self._settling = threading.Lock()
        self._ending = False
        self._only_views = False
        # A Unix socket is connected at once, but `on_open` is to come later.
        super().__init__(sock, surroundings, dialled=dialled, encoder=self._lender)
        self._borrower = Borrower(self, self._out)
        self._released = self._borrower.released

    # -- sending and receiving -----------------------------------------------------------------

    def stage(self, frame: Outgoing) -> bool:
        """Put the frame's buffers into the pool, once for all links of this endpoint."""
        if frame.on_device:
            frame.lower()
        return self._lender.stage(frame)

    def lent_bytes(self) -> int:
        """How much of this endpoint's memory the peer holds."""
        return self._lender.lent_bytes

    def open_side(self) -> None:
        """Make the second socket, before anything else is sent."""
        self._side = Side.open(self._socket)

    def _receive(self, room: memoryview, flags: int = 0) -> int:
        if self._side is not None:
            return super()._receive(room, flags)
        count, self._side = Side.receive(self._socket, room, flags)
        return count

    def _pass(self, fd: int) -> None:
        assert self._side is not None
        self._side.put(fd)

    def _absorb(self, frame: Incoming) -> bool:
        if frame.kind == MESSAGE and frame.ident:
            self._returned(frame.ident)
        if frame.kind >= SEGMENT and self.authenticated:
            self._housekeeping(frame)
        elif frame.kind == SIDE:
            return True
        elif not self._ending:
            if frame.places:
                if self._borrower.released:
                    self.settle()
                self._borrower.fill(frame, may_hold=not self._gone)
            return False
        if self._ending:
            self._end_if_free()
        return True

    def _housekeeping(self, frame: Incoming) -> None:
        if frame.kind == RELEASE:
            self._returned(*numbers_of(frame.header))
        elif frame.kind == SEGMENT:
            if self._side is None or len(frame.header) != 8:
                raise ProtocolError("a segment without its size")
            (size,) = numbers_of(frame.header)
            self._borrower.attach(frame.ident, self._side.get(), size)
        elif frame.kind == DROP:
            for uid in numbers_of(frame.header):
                self._borrower.drop(uid)
        elif frame.kind == END:
            self.close("the peer closed the connection")

    def _returned(self, *leases: int) -> None:
        with self._out:
            back = self._lender.take_back(leases)
        inspect(back, self.peer)
        back.clear()
        self._transport.freed()

    # -- giving back ---------------------------------------------------------------------------

    def gone(self, view: View) -> None:
        """The last view on a received buffer is gone. Called by a finalizer: takes no locks.

        What is released goes back with the next frame, or before the thread sleeps that reads this
        link; large memory at once.
        """
        released = self._borrower.released
        released.append(view)
        if view.length >= HURRY_BYTES or self._ending:
            self.settle()
        elif len(released) == 1 and self._watched:
            self._loop.post(self.settle)

    def give_back(self, lease: int) -> None:
        """What was lent has been copied."""
        self.send(release([lease]))

    def settle(self) -> None:
        """Make released memory the sender's again, and tell it. Never blocks."""
        if not self._settling.acquire(blocking=False):
            return  # whoever is at it looks again before it is done
        try:
            while self._borrower.released and self._out.acquire(blocking=False):
                try:
                    self._return(self._borrower.settle())
                finally:
                    self._out.release()
        finally:
            self._settling.release()

    def drop_segments(self) -> None:
        """Tell the peer of segments that are no more, so that it unmaps them."""
        with self._out:
            frame = None if self._gone else self._lender.drops()
            if frame is not None:
                self._post(frame)

    def _return(self, leases: list[int]) -> None:
        """Under `_out`."""
        if self._only_views:
            self._let_go()
        elif not self._gone:
            self._post(release(leases))
            if self._ending:
                self._loop.post(self._end_if_free)

    def _post(self, frame: Outgoing) -> None:
        """Queue a frame of the link's own; under `_out`."""
        self._queue.add(frame)
        if not self._writing:
            self._flush()

    def _let_in(self) -> None:
        if self._settling.acquire(blocking=False):
            leases = self._borrower.settle()
            self._queue.add(release(leases))
            self._settling.release()

    def _let_out(self) -> None:
        self.settle()

    def _return_one(self) -> int:
        if self._writing or self._gone or not self._settling.acquire(blocking=False):
            return 0
        leases = self._borrower.settle()
        self._settling.release()
        if len(leases) == 1:
            return leases[0]
        if leases:
            self._post(release(leases))
        return 0

    # -- the end -------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the connection. The socket stays open while either side has the other's memory."""
        with self._out:
            if self._gone or self._ending:
                return
            if self._connecting or not (self._lender.has_lent() or self._borrower.held):
                self._close_socket()
            else:
                self._ending = True
                self.unsent += self._queue.clear(whole=False)
                self._post(Outgoing(END))
        self._forget_if_gone()
        self._loop.post(lambda: self.owner.on_lost(self, reason))

    def finish(self) -> None:
        """The endpoint is closed, its loop stands still: keep the socket for the views alone."""
        with self._out:
            if self._gone:
                return
            self._gone = self._only_views = self._watched = True
            self._loop.poller.unregister(self._fd)
            self._let_go()
        self._forget_if_gone()

    def abandon(self) -> None:
        """In a forked child: views on memory live on, but the parent alone gives them back."""
        self._only_views = False
        if self._side is not None:
            self._side.close()
        super().abandon()

    def _eof(self, reason: str) -> None:
        """The peer's socket is closed: it has none of our memory any more."""
        with self._out:
            if self._gone:
                return
            told, self._ending = self._ending, True
            self._close_socket()
        self._forget_if_gone()
        if told:
            self._loop.post(lambda: self.unsent.clear())
        else:
            self._loop.post(lambda: self.owner.on_lost(self, reason))

    def _end_if_free(self) -> None:
        with self._out:
            if self._gone or self._lender.has_lent() or self._borrower.held:
                return
            self._close_socket()
        self._forget_if_gone()
        self._loop.post(lambda: self.unsent.clear())

    def _forget_if_gone(self) -> None:
        if self._gone:
            back = self._lender.take_all()
            back.clear()
            self._borrower.drop_all()
            if self._side is not None:
                self._side.close()
            self._transport.forget(self)

    def _let_go(self) -> None:
        if not self._borrower.held and self._socket.fileno() >= 0:
            self._socket.close()


class ShmTransport(Transport):
    """Listens on an abstract Unix socket; owns the pool."""

    name = "shm"
    scheme = "unix"

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        config = surroundings.config
        self.pool = Pool(config.pool_bytes, self._segment)
        self.stock = Stock(self.pool, config.inline_bytes, check=config.debug_in_place)
        self._socket: socket.socket | None = None
        self._links: dict[int, ShmLink] = {}
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
        return Address("unix", path=path)

    def dial(self, address: Address) -> Link:
        """Connect."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect("\0" + address.path.removeprefix("@"))
        except OSError:
            sock.close()
            raise
        link = self._link(sock, dialled=True)
        link.open_side()
        return link

    def allocate(self, nbytes: int) -> memoryview | None:
        """A place in the pool to be filled by the user; None where it is full at present."""
        lent = self.pool.allocate(nbytes)
        return None if lent is None else lent.array.data

    def shortage(self) -> str | None:
        """Who holds the pool, where a message could not be written for lack of room."""
        if not self.stock.starved:
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
        """Some of the pool is free again."""
        if self.stock.starved:
            self.stock.starved = False
            self.surroundings.loop.post(self.surroundings.owner.on_room)

    def forget(self, link: ShmLink) -> None:
        """A link's socket is closed."""
        if self._links.pop(link.number, None) is not None:
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

    def _segment(self, size: int) -> segments.Segment:
        """A new segment; from now on there is something to tidy."""
        segment = segments.OwnSegment.create(size)
        self._tidy_later()
        return segment

    def _tidy_later(self) -> None:
        if self._timer is None:
            after = self.surroundings.config.pool_idle_s
            self._timer = self.surroundings.loop.call_later(after, self._tidy)

    def _tidy(self) -> None:
        """Give idle memory back, and look whether memory freed by the user is wanted."""
        self.pool.trim()
        for link in list(self._links.values()):
            link.drop_segments()
        self.freed()
        self._timer = None
        if self.pool.statistics().segments:
            self._tidy_later()

"""StreamLink: frames over a connected, non-blocking stream socket (TCP or Unix).

Sending writes the original buffers (`sendmsg`) on the caller's thread; what the socket does not
take stays queued and leaves, many frames a system call, as the socket allows. Small frames go in
between the chunks of a large one, except those that must not overtake it.
"""

import contextlib
import errno
import functools
import itertools
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import (
    CHUNK,
    CHUNKED,
    PREFIX,
    ZEROS,
    Incoming,
    Outgoing,
    Reader,
    padded,
)
from rlinf.comm.poller import READ, WRITE
from rlinf.comm.transports.base import Link, Surroundings

WRITES_AT_ONCE = 256
READS_AT_ONCE = 16
JOIN_BYTES = 1 << 12

Piece = memoryview | bytes


class Entry:
    """Bytes about to leave, and whose they are if their end ends a frame."""

    __slots__ = ("data", "fds", "frame", "keep", "last")

    def __init__(self, data: Piece, frame: Outgoing, last: bool, fds: tuple[int, ...] = ()) -> None:
        self.data = data
        self.frame = frame
        self.last = last
        self.fds = fds
        self.keep: object = None


class StreamLink(Link):
    """See the module. `_out` guards everything of the sending side; reading is the leader's."""

    placed = False

    def __init__(
        self, sock: socket.socket, surroundings: Surroundings, *, dialled: bool, connecting: bool
    ) -> None:
        super().__init__(surroundings.owner, dialled=dialled)
        self._socket = sock
        self._fd = sock.fileno()
        self._loop = surroundings.loop
        self._deferred = surroundings.deferred
        self._chunk = surroundings.config.chunk_bytes
        self._reader = Reader(placed=self.placed, limit_bytes=surroundings.config.max_message_bytes)
        self._out = threading.Lock()
        self._wire: deque[Entry] = deque()
        self._small: deque[Outgoing] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._bulk_orders: Counter[tuple[int, int, bytes]] = Counter()
        self._rest: deque[Piece] | None = None
        self._connecting = connecting
        self._writing = connecting
        self._gone = False
        self._loop.poller.register(self._fd, self._ready)
        if connecting:
            self._loop.poller.modify(self._fd, READ | WRITE)

    def authenticate(self) -> None:
        """Allow payload."""
        super().authenticate()
        self._reader.authenticated = True

    # -- sending -------------------------------------------------------------------------------

    def send(self, frame: Outgoing) -> bool:
        """Write now what the socket takes, queue the rest."""
        with self._out:
            if self._gone:
                return False
            if not frame.buffers and not (self._writing or self._small or self._bulk):
                self._send_now(frame)
                return True
            body = sum(b.nbytes for b in self._inline(frame))
            order = frame.order()
            if body > self._chunk or self._bulk_orders.get(order):
                self._bulk.append(frame)
                self._bulk_orders[order] += 1
            else:
                self._small.append(frame)
            if not self._writing:
                self._flush()
                if frame.done is None and self._writing:
                    self._keep(frame)
            elif frame.done is None:
                self._keep(frame)
        self._let_out()
        return True

    def _send_now(self, frame: Outgoing) -> None:
        """A frame without buffers when nothing else waits: one system call, and that is all."""
        data = self._encode(frame)
        try:
            count = self._socket.send(data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self._small.append(frame)
            self._fail_later(_reason(error))
            return
        if count == len(data):
            if frame.done is not None:
                self._finish(frame)
            return
        self._wire.append(Entry(memoryview(data)[count:], frame, True))
        self._ask(True)

    def _finish(self, frame: Outgoing) -> None:
        """A frame has left: whoever holds its buffers may let go."""
        done, frame.done = frame.done, None
        if done is not None:
            self._deferred.add(functools.partial(done.set_result, None))

    def _let_out(self) -> None:
        """`_out` was just released."""

    def queued(self) -> bool:
        """Whether frames are still waiting to leave."""
        return bool(self._wire or self._small or self._bulk)

    def _inline(self, frame: Outgoing) -> Sequence[memoryview]:
        return frame.buffers

    def _count(self, frame: Outgoing) -> int:
        return len(frame.buffers)

    def _flags(self, frame: Outgoing) -> int:
        return 0

    def _descriptors(self, frame: Outgoing) -> bytes:
        return struct.pack(f"<{len(frame.buffers)}Q", *[b.nbytes for b in frame.buffers])

    def _encode(self, frame: Outgoing, flags: int = 0, chunk: int = 0) -> bytes:
        """Prefix and head of a frame."""
        prefix = PREFIX.pack(
            frame.kind if not chunk else CHUNK,
            flags | self._flags(frame),
            0 if chunk else len(frame.service),
            0 if chunk else len(frame.header),
            0 if chunk else self._count(frame),
            chunk,
            frame.tag,
            frame.ident,
            self.credit(),
        )
        if chunk:
            return prefix
        if not self._count(frame):
            return b"".join((prefix, frame.service, frame.header))
        return b"".join((prefix, frame.service, self._descriptors(frame), frame.header))

    def _flush(self) -> None:
        """Write until nothing is left or the socket is full; under `_out`."""
        while True:
            if not self._wire:
                self._refill()
                if not self._wire:
                    break
            try:
                count = self._write()
            except BlockingIOError:
                self._ask(True)
                return
            except OSError as error:
                self._fail_later(_reason(error))
                return
            self._written(count)
        self._ask(False)

    def _write(self) -> int:
        wire = self._wire
        if wire[0].fds:
            return self._socket.sendmsg([wire[0].data], _rights(wire[0].fds))
        if len(wire) == 1:
            return self._socket.send(wire[0].data)
        together = itertools.takewhile(lambda e: not e.fds, itertools.islice(wire, WRITES_AT_ONCE))
        return self._socket.sendmsg([entry.data for entry in together])

    def _written(self, count: int) -> None:
        wire = self._wire
        while wire:
            entry = wire[0]
            size = len(entry.data) if isinstance(entry.data, bytes) else entry.data.nbytes
            if count < size:
                if count:
                    entry.fds = ()
                    entry.data = memoryview(entry.data)[count:]
                return
            count -= size
            wire.popleft()
            if entry.last and entry.frame.done is not None:
                self._finish(entry.frame)

    def _refill(self) -> None:
        while self._small:
            frame = self._small.popleft()
            self._commit(frame)
        if self._bulk:
            self._commit_bulk(self._bulk[0])

    def _commit(self, frame: Outgoing) -> None:
        """Put a whole frame on the wire queue."""
        self._introduce(frame)
        self._append(self._encode(frame), self._pieces(frame), frame, last=True)

    def _introduce(self, frame: Outgoing) -> None:
        """Put before a frame what the peer has to know to understand it."""

    def _pieces(self, frame: Outgoing) -> list[Piece]:
        pieces: list[Piece] = []
        for buffer in self._inline(frame):
            size = buffer.nbytes
            if size:
                pieces.append(buffer.cast("B") if buffer.format != "B" else buffer)
            if padded(size) != size:
                pieces.append(ZEROS[: padded(size) - size])
        return pieces

    def _append(self, head: bytes, pieces: list[Piece], frame: Outgoing, *, last: bool) -> None:
        if pieces and sum(map(len, pieces)) <= JOIN_BYTES:
            head, pieces = b"".join((head, *pieces)), []
        self._wire.append(Entry(head, frame, last and not pieces))
        for index, piece in enumerate(pieces, 1):
            self._wire.append(Entry(piece, frame, last and index == len(pieces)))

    def _commit_bulk(self, frame: Outgoing) -> None:
        """Put the next chunk of a large frame (or a small one in its queue) on the wire queue."""
        if self._rest is None:
            self._introduce(frame)
            pieces = self._pieces(frame)
            if sum(map(len, pieces)) <= self._chunk:
                self._append(self._encode(frame), pieces, frame, last=True)
                self._end_bulk(frame)
                return
            self._append(self._encode(frame, CHUNKED), [], frame, last=False)
            self._rest = deque(pieces)
        chunk: list[Piece] = []
        size = 0
        while self._rest and size < self._chunk:
            piece = memoryview(self._rest[0])
            room = self._chunk - size
            if piece.nbytes > room:
                self._rest[0] = piece[room:]
                piece = piece[:room]
            else:
                self._rest.popleft()
            chunk.append(piece)
            size += piece.nbytes
        self._append(self._encode(frame, chunk=size), chunk, frame, last=not self._rest)
        if not self._rest:
            self._end_bulk(frame)

    def _end_bulk(self, frame: Outgoing) -> None:
        self._rest = None
        self._bulk.popleft()
        order = frame.order()
        self._bulk_orders[order] -= 1
        if not self._bulk_orders[order]:
            del self._bulk_orders[order]

    def _keep(self, frame: Outgoing) -> None:
        """Copy what is still queued of a frame whose buffers may be changed from now on."""
        if self._bulk and frame is self._bulk[0] and self._rest is not None:
            self._rest = deque(_copy(piece) for piece in self._rest)
        elif frame in self._bulk or frame in self._small:
            frame.buffers = [_copy(b) for b in frame.buffers]  # type: ignore[misc]
        for entry in self._wire:
            if entry.frame is frame:
                entry.data = _copy(entry.data)

    def _ask(self, writing: bool) -> None:
        if writing != self._writing:
            self._writing = writing
            self._loop.poller.modify(self._fd, READ | WRITE if writing else READ)

    # -- reading, on the dispatching thread ----------------------------------------------------

    def _ready(self, flags: int) -> None:
        if flags & WRITE and not self._gone:
            if self._connecting and not self._connected():
                return
            with self._out:
                if not self._gone:
                    self._flush()
            self._let_out()
            self._deferred.run()
        if flags & ~WRITE:
            self._read()

    def _connected(self) -> bool:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.close(f"connect: {errno.errorcode.get(code, code)}")
            return False
        self._connecting = False
        with self._out:
            self._flush()
        self._deferred.run()
        self.owner.on_open(self)
        return True

    def _read(self) -> None:
        for _ in range(READS_AT_ONCE):
            if self._gone:
                return
            room = self._reader.space()
            try:
                count = self._receive(room)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._eof(_reason(error))
                return
            if not count:
                self._eof("the peer closed the connection")
                return
            self._reader.filled(room, count)
            self._loop.nested(self._pump)
            if count < room.nbytes:
                return

    def _receive(self, room: memoryview) -> int:
        return self._socket.recv_into(room)

    def _pump(self) -> None:
        """Report the frames that have been read."""
        try:
            while not self._gone:
                frame = self._reader.next()
                if frame is None:
                    return
                self._report(frame)
        except ProtocolError as error:
            self.close(str(error))

    def _report(self, frame: Incoming) -> None:
        self.owner.on_frame(self, frame)

    # -- the end -------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Drop the connection now."""
        with self._out:
            if self._gone:
                return
            self._close_socket()
        self._loop.post(lambda: self.owner.on_lost(self, reason))

    def _eof(self, reason: str) -> None:
        """The peer's end of the socket is closed."""
        self.close(reason)

    def _close_socket(self) -> None:
        """Under `_out`."""
        self._gone = True
        self._loop.poller.unregister(self._fd)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._discard()

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors, without a shutdown."""
        self._gone = True
        self._socket.close()

    def _discard(self, *, keep_wire: bool = False) -> None:
        self.unsent.extend({id(f): f for f in self._frames()}.values())
        if not keep_wire:
            self._wire.clear()
        self._small.clear()
        self._bulk.clear()
        self._rest = None

    def _frames(self) -> Iterator[Outgoing]:
        yield from (entry.frame for entry in self._wire)
        yield from self._bulk
        yield from self._small

    def _fail_later(self, reason: str) -> None:
        """A write failed: what the peer sent before is still read, then the link is lost."""
        self._discard()
        self._ask(False)
        self._loop.post(lambda: self._drain(reason))

    def _drain(self, reason: str) -> None:
        self._read()
        self._eof(reason)


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def _copy(piece: Piece) -> Piece:
    return piece if isinstance(piece, bytes) else memoryview(bytes(piece))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

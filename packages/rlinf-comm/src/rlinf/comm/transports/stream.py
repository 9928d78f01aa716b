"""StreamLink: frames over a connected, non-blocking stream socket (TCP or Unix).

Sending writes the original buffers (`sendmsg`) on the caller's thread; what the socket does not
take stays queued and leaves, many frames a system call, as the socket allows.
"""

import contextlib
import errno
import functools
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Collection
from typing import ClassVar

from rlinf.comm.errors import CodecError, PoolExhausted, ProtocolError
from rlinf.comm.frame import MESSAGE, PREFIX, Incoming, Outgoing
from rlinf.comm.poller import READ, WRITE
from rlinf.comm.reader import Reader
from rlinf.comm.transports.base import Link, Surroundings, small
from rlinf.comm.transports.send_queue import Encoder, Entry, SendQueue

WRITES_AT_ONCE = 256
READS_AT_ONCE = 16


class StreamLink(Link):
    """See the module. `_out` guards everything of the sending side; reading is the leader's.

    Args:
        sock: Connected, or being connected; non-blocking. The link owns it.
        surroundings: Of the endpoint.
        dialled: Whether this side made the connection; `on_open` is then reported.
        encoder: How frames become bytes.
    """

    placed: ClassVar[bool] = False

    def __init__(
        self,
        sock: socket.socket,
        surroundings: Surroundings,
        *,
        dialled: bool,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(surroundings.owner, dialled=dialled)
        config = surroundings.config
        self._socket = sock
        self._fd = sock.fileno()
        self._loop = surroundings.loop
        self._deferred = surroundings.deferred
        self._reader = Reader(placed=self.placed, limit_bytes=config.max_message_bytes)
        self._reader.memory = surroundings.memory
        self._out = threading.Lock()
        self._encoder = encoder or Encoder()
        self._queue = SendQueue(self._encoder, config.chunk_bytes)
        self._connecting = self._writing = dialled
        self._gone = False
        self._released: Collection[object] = ()  # what the link itself has to tell the peer
        self._loop.poller.register(self._fd, self._ready)
        if dialled:
            self._loop.poller.modify(self._fd, READ | WRITE)

    def authenticate(self) -> None:
        """Allow payload."""
        super().authenticate()
        self._reader.authenticate()

    def credits(self, collect: Callable[[], int]) -> None:
        """Put this credit into the frames that leave."""
        self._encoder.credit = collect

    # -- sending -------------------------------------------------------------------------------

    def send(self, frame: Outgoing) -> bool:
        """Write now what the socket takes, queue the rest."""
        with self._out:
            if self._gone:
                return False
            if self._released:
                self._let_in()
            if self._writing:
                self._queue.add(frame)
                if frame.done is None:
                    self._queue.keep(frame)
            elif frame.buffers or self._queue:
                self._queue.add(frame)
                self._flush()
                if frame.done is None and self._writing:
                    self._queue.keep(frame)
            else:
                data = self._encoder.head(frame)
                count = self._attempt(data)
                if count != len(data):
                    self._stuck(data, count, frame)
                elif frame.done is not None:
                    self._finish(frame)
        if self._released:
            self._let_out()
        return True

    def send_small(self, tag: int, flags: int, header: bytes) -> bool:
        """Nothing else waits, as a rule: then it is one system call, and that is all."""
        with self._out:
            if not (self._released or self._writing or self._gone):
                mark, short = (flags, header) if flags else self._encoder.short(0, header)
                credit = self._encoder.credit()
                data = PREFIX.pack(MESSAGE, mark, 0, len(short), 0, 0, tag, 0, credit) + short
                count = self._attempt(data)
                if count != len(data):
                    self._stuck(data, count, small(tag, flags, header))
                return True
        return super().send_small(tag, flags, header)

    def queued(self) -> bool:
        """Whether frames are still waiting to leave."""
        return bool(self._queue)

    def _attempt(self, data: bytes) -> int:
        """Send what the socket takes: that many bytes, -1 if the link is lost."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail_later(_reason(error))
            return -1

    def _stuck(self, data: bytes, count: int, frame: Outgoing) -> None:
        """Only `count` bytes of a frame without buffers could be sent."""
        if count < 0:
            self.unsent.append(frame)
        else:
            self._queue.wire.append(Entry(memoryview(data)[count:], frame, True))
            self._ask(True)

    def _flush(self) -> None:
        """Write until nothing is left or the socket is full; under `_out`."""
        queue = self._queue
        while queue.wire or queue.refill():
            try:
                count = self._write()
            except BlockingIOError:
                self._ask(True)
                return
            except OSError as error:
                self._fail_later(_reason(error))
                return
            for frame in queue.written(count):
                self._finish(frame)
        self._ask(False)

    def _write(self) -> int:
        wire = self._queue.wire
        if wire[0].fds:
            return self._socket.sendmsg([wire[0].data], _rights(wire[0].fds))
        if len(wire) == 1:
            return self._socket.send(wire[0].data)
        together = itertools.takewhile(lambda e: not e.fds, itertools.islice(wire, WRITES_AT_ONCE))
        return self._socket.sendmsg([entry.data for entry in together])

    def _finish(self, frame: Outgoing) -> None:
        """A frame has left: whoever holds its buffers may let go."""
        done, frame.done = frame.done, None
        if done is not None:
            self._deferred.add(functools.partial(done.set_result, None))

    def _ask(self, writing: bool) -> None:
        if writing != self._writing:
            self._writing = writing
            self._loop.poller.modify(self._fd, READ | WRITE if writing else READ)

    def _let_in(self) -> None:
        """A frame is about to leave: what was released may go along. Under `_out`."""

    def _let_out(self) -> None:
        """`_out` is free again, and there is something released."""

    # -- reading, on the dispatching thread ----------------------------------------------------

    def _ready(self, flags: int) -> None:
        if flags != READ and flags & WRITE and not self._gone:
            if self._connecting and not self._connected():
                return
            with self._out:
                if not self._gone:
                    self._flush()
            if self._released:
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
        self._open()
        return True

    def _open(self) -> None:
        """The connection is there."""
        self.owner.on_open(self)

    def _read(self) -> None:
        reader, busy = self._reader, self._loop.busy
        for _ in range(READS_AT_ONCE):
            if self._gone:
                return
            room = reader.space()
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
            reader.filled(room, count)
            busy.append(self._pump)  # a wait from within runs it again, before it polls
            try:
                self._pump()
            finally:
                busy.pop()
            if count < room.nbytes:
                return

    def _receive(self, room: memoryview) -> int:
        return self._socket.recv_into(room)

    def _pump(self) -> None:
        """Report the frames that have been read."""
        reader = self._reader
        try:
            while not self._gone:
                frame = reader.next()
                if frame is None:
                    return
                self._report(frame)
                if reader.pos == reader.end:
                    return
        except (ProtocolError, CodecError, PoolExhausted) as error:
            self.close(str(error))
        except MemoryError:
            self.close("there is no memory for a message of the size it claims to have")

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

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors, without a shutdown."""
        self._gone = True
        self._socket.close()

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
        self.unsent += self._queue.clear(whole=True)

    def _fail_later(self, reason: str) -> None:
        """A write failed: what the peer sent before is still read, then the link is lost."""
        self.unsent += self._queue.clear(whole=True)
        self._ask(False)
        self._loop.post(lambda: self._drain(reason))

    def _drain(self, reason: str) -> None:
        self._read()
        self._eof(reason)


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

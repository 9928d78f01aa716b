"""StreamLink: frames over a connected, non-blocking stream socket (TCP or Unix).

Sending writes the original buffers (`sendmsg`) on the caller's thread; what the socket does not
take stays queued and leaves, many frames a system call, as the socket allows.

Reading is done by one thread at a time. As a rule that is the one that dispatches, told by the
poller. A thread that waits for a message of this link's peer reads it itself (`take`): it sleeps in
the socket, not in the poller, and what it waits for passes nobody else's hands. While that goes on
the socket is out of the poller; what is not for that thread is handed to the one that dispatches.
Once nobody has read for a millisecond, or somebody waits in another way, the poller has it again.
"""

import contextlib
import errno
import functools
import itertools
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import ClassVar

from rlinf.comm.errors import CodecError, PoolExhausted, ProtocolError
from rlinf.comm.frame import MANY, MESSAGE, PREFIX, RAW, Incoming, Outgoing
from rlinf.comm.poller import READ, WRITE
from rlinf.comm.reader import Reader
from rlinf.comm.transports.base import Desk, Link, Surroundings, small
from rlinf.comm.transports.send_queue import Encoder, Entry, SendQueue
from rlinf.comm.window import Window

WRITES_AT_ONCE = 256
READS_AT_ONCE = 16
TAKE_S = 0.02  # how long a thread sleeps in the socket before it waits in the usual way
LINGER_S = 0.001
BROKEN = (ProtocolError, CodecError, PoolExhausted, MemoryError)
DONTWAIT = socket.MSG_DONTWAIT
_PATIENCE = struct.pack("ll", 0, round(TAKE_S * 1e6))  # a timeval


class StreamLink(Link):
    """See the module. `_out` guards everything of the sending side, `_reading` the other one.

    Args:
        sock: Connected, or being connected; non-blocking. The link owns it.
        surroundings: Of the endpoint.
        dialled: Whether this side made the connection; `on_open` is then reported.
        encoder: How frames become bytes.
    """

    placed: ClassVar[bool] = False
    shared: ClassVar[bool] = True  # whether other threads than the dispatching one may read

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
        self._gone = self._shut = False
        self._released: Collection[object] = ()  # what the link itself has to tell the peer
        self._reading = threading.RLock()
        self._shared = False
        self._watched = True  # by the poller
        self._looking = self._used = False
        self._handed: deque[Incoming] = deque()
        self._handing = 0
        self._loop.poller.register(self._fd, self._ready)
        if dialled:
            self._loop.poller.modify(self._fd, READ | WRITE)

    def authenticate(self) -> None:
        """Allow payload."""
        super().authenticate()
        self._reader.authenticate()
        if self.shared and self._loop.poller.pauses:
            self._socket.setblocking(True)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PATIENCE)
            self._shared = True

    def bind(self, window: Window) -> None:
        """Put its credit into the frames that leave."""
        super().bind(window)
        self._encoder.credit = window.collect

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
                try:
                    count = self._socket.send(data, DONTWAIT)
                except OSError as error:
                    count = self._refused(error)
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
            return self._socket.send(data, DONTWAIT)
        except OSError as error:
            return self._refused(error)

    def _refused(self, error: OSError) -> int:
        if isinstance(error, BlockingIOError):
            return 0
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
            return self._socket.sendmsg([wire[0].data], _rights(wire[0].fds), DONTWAIT)
        if len(wire) == 1:
            return self._socket.send(wire[0].data, DONTWAIT)
        together = itertools.takewhile(lambda e: not e.fds, itertools.islice(wire, WRITES_AT_ONCE))
        return self._socket.sendmsg([entry.data for entry in together], (), DONTWAIT)

    def _finish(self, frame: Outgoing) -> None:
        """A frame has left: whoever holds its buffers may let go."""
        done, frame.done = frame.done, None
        if done is not None:
            self._deferred.add(functools.partial(done.set_result, None))

    def _ask(self, writing: bool) -> None:
        if writing != self._writing:
            self._writing = writing
            self._poll()

    def _poll(self) -> None:
        """Tell the poller what to look for; under `_out`."""
        flags = (READ if self._watched else 0) | (WRITE if self._writing else 0)
        self._loop.poller.modify(self._fd, flags)

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
        if not self._reading.acquire(blocking=False):
            return  # whoever reads sees to it
        busy = self._loop.busy
        busy.append(self._pump)  # a wait from within runs it again, before it polls
        try:
            self._pump()
            for _ in range(READS_AT_ONCE):
                more = not self._gone and self._receive_some()
                self._pump()
                if not more:
                    return
        finally:
            busy.pop()
            self._done_reading()

    def _receive_some(self) -> bool:
        """Read what is there; says whether there may be more. Under `_reading`."""
        room = self._reader.space()
        try:
            count = self._receive(room, DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._eof(_reason(error))
            return False
        if not count:
            self._eof("the peer closed the connection")
            return False
        self._reader.filled(room, count)
        return count == room.nbytes

    def _receive(self, room: memoryview, flags: int) -> int:
        return self._socket.recv_into(room, 0, flags)

    def _pump(self) -> None:
        """Report the frames that have been read. On the dispatching thread, under `_reading`."""
        try:
            while self._handed:
                self._report()
            while (frame := self._next()) is not None:
                self.owner.on_frame(self, frame)
        except BROKEN as error:
            self._broken(error)

    def _next(self) -> Incoming | None:
        """The next frame that is not for the link itself, of what was read. Under `_reading`."""
        reader = self._reader
        while not self._gone and (frame := reader.next()) is not None:
            if frame.credit:
                self._credit(frame.credit)
            if not self._absorb(frame):
                return frame
        return None

    def _absorb(self, frame: Incoming) -> bool:
        """Whether a frame was for the link itself."""
        return False

    def _credit(self, credit: int) -> None:
        window = self.window
        window.given += credit
        if window.refused:
            self._loop.post(functools.partial(self.owner.on_credit, self))

    def _broken(self, error: Exception) -> None:
        if isinstance(error, MemoryError):
            self.close("there is no memory for a message of the size it claims to have")
        else:
            self.close(str(error))

    # -- reading, on a thread that waits for a message -----------------------------------------

    def take(self, tag: int, desk: Desk, deadline: float | None) -> bytes | Incoming | None:
        """See `Link.take`; what comes for others is handed to the dispatching thread."""
        if not self._shared or not self._reading.acquire(blocking=False):
            return None
        try:
            # What was handed over is older than what is read now.
            if self._handed or self._handing or self._gone or not desk.is_free(tag):
                return None
            if self._watched:
                self._look_away()
            self._used = True
            return self._await(tag, desk, deadline)
        except BROKEN as error:
            self._broken(error)
            return None
        finally:
            self._done_reading()

    def _await(self, tag: int, desk: Desk, deadline: float | None) -> bytes | Incoming | None:
        reader, window = self._reader, self.window
        unread = reader.pos != reader.end
        while True:
            if unread:
                found = reader.message(tag)
                if found is not None:
                    credit, flags, header = found
                    window.taken += 1
                    window.taken_bytes += len(header)
                    if credit:
                        self._credit(credit)
                    return header if flags & RAW else Incoming(MESSAGE, tag, 0, 0, flags, header)
                frame = self._next()
                if frame is not None:
                    return self._mine(frame, tag, desk)
                if self._gone or (deadline is not None and time.monotonic() > deadline):
                    return None
            room = reader.space()
            try:
                count = self._receive(room, 0)
            except OSError:
                return None  # nothing comes, or nothing ever will: the poller will tell which
            if not count:
                return None
            reader.filled(room, count)
            unread = True

    def _mine(self, frame: Incoming, tag: int, desk: Desk) -> Incoming | None:
        """The frame, if that is what was waited for, else it is handed over."""
        if frame.kind != MESSAGE or frame.tag != tag:
            self._handed.append(frame)
            self._loop.post(self._hand_over)
            return None
        if frame.flags & MANY:
            return desk.first(self, frame)
        self.window.taken += 1
        self.window.taken_bytes += frame.nbytes
        return frame

    def _hand_over(self) -> None:
        """Report what another thread has read. On the dispatching thread."""
        try:
            while self._handed:
                self._report()
        except BROKEN as error:
            self._broken(error)

    def _report(self) -> None:
        self._handing += 1
        try:
            self.owner.on_frame(self, self._handed.popleft())
        finally:
            self._handing -= 1

    def _look_away(self) -> None:
        """The poller is not to see what comes. Under `_reading`."""
        with self._out:
            if self._gone:
                return
            self._watched = False
            self._poll()
        self._loop.apart.add(self._look_again)
        if not self._looking:
            self._looking = True
            self._loop.call_later(LINGER_S, self._look)

    def _look(self) -> None:
        """On the dispatching thread: is this link still read by others?"""
        used, self._used = self._used, False
        if self._gone or not (used or not self._look_again()):
            self._looking = False
        else:
            self._loop.call_later(LINGER_S, self._look)

    def _look_again(self) -> bool:
        """The poller is to see what comes; False: somebody is reading."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            with self._out:
                if not self._gone and not self._watched:
                    self._watched = True
                    self._poll()
            self._loop.apart.discard(self._look_again)
            if self._reader.pos != self._reader.end:
                self._loop.post(self._read)
            return True
        finally:
            self._done_reading()

    def _done_reading(self) -> None:
        """Whoever reads last when the link is closed closes the socket, too."""
        self._reading.release()
        if self._shut:
            self._socket.close()

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
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that reads wakes up
        self._loop.apart.discard(self._look_again)
        self._shut = True
        if self._reading.acquire(blocking=False):
            self._done_reading()
        self.unsent += self._queue.clear(whole=True)

    def _fail_later(self, reason: str) -> None:
        """A write failed: what the peer sent before is still read, then the link is lost."""
        self.unsent += self._queue.clear(whole=True)
        self._ask(False)
        self._loop.post(lambda: self._drain(reason))

    def _drain(self, reason: str) -> None:
        if not self._reading.acquire(blocking=False):
            self._loop.call_later(LINGER_S, lambda: self._drain(reason))
            return
        try:
            self._read()
            self._eof(reason)
        finally:
            self._done_reading()


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

"""StreamLink: frames over a connected, non-blocking stream socket (TCP or Unix).

Sending writes the original buffers (`sendmsg`) on the caller's thread; what the socket does not
take stays queued and leaves, many frames a system call, as the socket allows.
"""

import contextlib
import errno
import functools
import itertools
import socket

from rlinf.comm.frame import MESSAGE, PREFIX, Outgoing
from rlinf.comm.poller import READ, WRITE
from rlinf.comm.transports.base import Surroundings, small
from rlinf.comm.transports.reading import DONTWAIT, LINGER_S, ReadingLink, reason_of
from rlinf.comm.transports.send_queue import Encoder, Entry, SendQueue
from rlinf.comm.window import Window

WRITES_AT_ONCE = 256


class StreamLink(ReadingLink):
    """See the module. `_out` guards everything of the sending side.

    Args:
        sock: Connected, or being connected; non-blocking. The link owns it.
        surroundings: Of the endpoint.
        dialled: Whether this side made the connection; `on_open` is then reported.
        encoder: How frames become bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        surroundings: Surroundings,
        *,
        dialled: bool,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(sock, surroundings, dialled=dialled)
        self._deferred = surroundings.deferred
        self._encoder = encoder or Encoder()
        self._queue = SendQueue(self._encoder, surroundings.config.chunk_bytes)
        self._connecting = self._writing = dialled
        self._loop.poller.register(self._fd, self._ready)
        if dialled:
            self._loop.poller.modify(self._fd, READ | WRITE)

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
            ident = self._return_one() if self._released else 0
            if not (self._released or self._writing or self._gone):
                if not flags:
                    flags, header = self._encoder.short(0, header)
                credit, size = self.window.collect(), len(header)
                data = PREFIX.pack(MESSAGE, flags, 0, size, 0, 0, tag, ident, credit) + header
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
        self._fail_later(reason_of(error))
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
                self._fail_later(reason_of(error))
                return
            for frame in queue.written(count):
                self._finish(frame)
        self._ask(False)

    def _write(self) -> int:
        together = list(itertools.islice(self._queue.wire, WRITES_AT_ONCE))
        for entry in together:
            if entry.fd is not None:
                self._pass(entry.fd)
                entry.fd = None
        if len(together) == 1:
            return self._socket.send(together[0].data, DONTWAIT)
        return self._socket.sendmsg([entry.data for entry in together], (), DONTWAIT)

    def _pass(self, fd: int) -> None:
        """Pass a descriptor that the peer needs for the bytes that come next."""
        raise NotImplementedError

    def _finish(self, frame: Outgoing) -> None:
        """A frame has left: whoever holds its buffers may let go."""
        done, frame.done = frame.done, None
        if done is not None:
            self._deferred.add(functools.partial(done.set_result, None))

    def _ask(self, writing: bool) -> None:
        if writing != self._writing:
            self._writing = writing
            self._poll()

    def _let_in(self) -> None:
        """A frame is about to leave: what was released may go along. Under `_out`."""

    def _return_one(self) -> int:
        """What a message is to say of what is released, if that is one thing. Under `_out`."""
        return 0

    # -- told by the poller --------------------------------------------------------------------

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
        self._gone = self._watched = True
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

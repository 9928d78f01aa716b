"""ReadingLink: the reading side of a link over a stream socket, and which thread does the reading.

Reading is done by one thread at a time. As a rule that is the one that dispatches, told by the
poller. A thread that waits for a message of this link's peer reads it itself (`take`): it sleeps in
the socket, not in the poller, and what it waits for passes nobody else's hands. While that goes on
the socket is out of the poller; what is not for that thread is handed to the one that dispatches.
Once nobody has read for a millisecond, or somebody waits in another way, the poller has it again.
"""

import functools
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection
from typing import ClassVar

from rlinf.comm.errors import CodecError, PoolExhausted, ProtocolError
from rlinf.comm.frame import CREDIT, MANY, MESSAGE, RAW, Incoming, Outgoing
from rlinf.comm.poller import READ, WRITE
from rlinf.comm.reader import Reader
from rlinf.comm.transports.base import Desk, Link, Surroundings
from rlinf.comm.window import LETTER_BYTES

READS_AT_ONCE = 16
TAKE_S = 0.02  # how long a thread sleeps in the socket before it waits in the usual way
LINGER_S = 0.001
BROKEN = (ProtocolError, CodecError, PoolExhausted, MemoryError)
DONTWAIT = socket.MSG_DONTWAIT
_PATIENCE = struct.pack("ll", 0, round(TAKE_S * 1e6))  # a timeval


class ReadingLink(Link):
    """See the module. `_reading` guards all of it, `_out` what the sending side shares with it.

    Args:
        sock: Non-blocking. The link owns it.
        surroundings: Of the endpoint.
        dialled: Whether this side made the connection.
    """

    placed: ClassVar[bool] = False
    shared: ClassVar[bool] = True  # whether other threads than the dispatching one may read

    def __init__(self, sock: socket.socket, surroundings: Surroundings, *, dialled: bool) -> None:
        super().__init__(surroundings.owner, dialled=dialled)
        self._socket = sock
        self._fd = sock.fileno()
        self._loop = surroundings.loop
        limit = surroundings.config.max_message_bytes
        self._reader = Reader(placed=self.placed, limit_bytes=limit)
        self._reader.memory = surroundings.memory
        self._out = threading.Lock()
        self._reading = threading.RLock()
        self._writing = False  # the poller is to tell when there is room
        self._gone = self._shut = False
        self._released: Collection[object] = ()  # what the link itself has to tell the peer
        self._shared = False
        self._watched = True  # by the poller
        self._looking = self._used = False
        self._handed: deque[Incoming] = deque()
        self._handing = 0

    def authenticate(self) -> None:
        """Allow payload."""
        super().authenticate()
        self._reader.authenticate()
        if self.shared and self._loop.poller.pauses:
            self._socket.setblocking(True)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PATIENCE)
            self._shared = True

    @abstractmethod
    def _eof(self, reason: str) -> None:
        """The peer's end of the socket is closed."""

    def _let_out(self) -> None:
        """`_out` is free again, and there is something released."""

    def _returned(self, ident: int) -> None:
        """The peer's message said so."""

    def _poll(self) -> None:
        """Tell the poller what to look for; under `_out`."""
        flags = (READ if self._watched else 0) | (WRITE if self._writing else 0)
        self._loop.poller.modify(self._fd, flags)

    # -- on the dispatching thread -------------------------------------------------------------

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
            self._eof(reason_of(error))
            return False
        if not count:
            self._eof("the peer closed the connection")
            return False
        self._reader.filled(room, count)
        return count == room.nbytes

    def _receive(self, room: memoryview, flags: int = 0) -> int:
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

    def take(
        self, tag: int, desk: Desk, begun: float, limit_s: float | None
    ) -> bytes | Incoming | None:
        """See `Link.take`; what comes for others is handed to the dispatching thread."""
        if not self._reading.acquire(False):
            return None
        try:
            if (self._watched and not self._look_away()) or not desk.is_free(tag):
                return None
            self._used = True
            if self._released:
                self._let_out()  # before this thread sleeps
            while True:
                found = self._reader.message(tag, self._socket.recv_into)
                if found is not None:
                    credit, ident, flags, header = found
                    if ident:
                        self._returned(ident)
                    self._count(len(header), credit)
                    return header if flags == RAW else Incoming(MESSAGE, tag, 0, 0, flags, header)
                frame = self._next()
                if frame is not None:
                    return self._mine(frame, tag, desk)
                if self._gone or (limit_s is not None and time.monotonic() - begun > limit_s):
                    return None
                room = self._reader.space()
                count = self._receive(room)
                if not count:
                    return None
                self._reader.filled(room, count)
        except OSError:
            return None  # nothing comes, or nothing ever will: the poller will tell which
        except BROKEN as error:
            self._broken(error)
            return None
        finally:
            self._done_reading()

    def _count(self, nbytes: int, credit: int) -> None:
        """A message is received, past the mailbox."""
        window = self.window
        if credit:
            window.given += credit
            if window.refused:
                self._credit(0)
        window.taken += 1
        window.passed += nbytes + LETTER_BYTES
        if window.eager or window.consumed + window.passed - window.told > window.enough:
            self.send(Outgoing(CREDIT))

    def _mine(self, frame: Incoming, tag: int, desk: Desk) -> Incoming | None:
        """The frame, if that is what was waited for, else it is handed over."""
        if frame.kind != MESSAGE or frame.tag != tag:
            self._handed.append(frame)
            self._loop.post(self._hand_over)
            self._look_again()
            return None
        if frame.flags & MANY:
            frame = desk.first(self, frame)
        self._count(frame.nbytes, 0)
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

    def _look_away(self) -> bool:
        """The poller is not to see what comes; False: it has to. Under `_reading`."""
        if self._handed or self._handing or not self._shared:
            return False  # what was handed over is older than what would be read now
        with self._out:
            if self._gone:
                return False
            self._watched = False
            self._poll()
        self._loop.apart.add(self._look_again)
        if not self._looking:
            self._looking = True
            self._loop.call_later(LINGER_S, self._look)
        return True

    def _look(self) -> None:
        """On the dispatching thread: is this link still read by others?"""
        used, self._used = self._used, False
        if self._released:
            self._let_out()
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


def reason_of(error: OSError) -> str:
    """What happened, in words."""
    return error.strerror or str(error)

"""Carrier: what moves buffers beside a connection, and the notes both of its ends exchange.

A carrier is one direction between two workers, made at the first buffer that goes that way. It is
used by one thread at each end, and may block there; `close` comes from another one.
"""

import struct
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rlinf.comm.errors import ProtocolError, Timeout

_NOTE = struct.Struct("<H")

Buffer = Any
"""A memoryview or an `OnDevice`."""


class Carrier(Protocol):
    """One end. What the sending end is given, in order, the receiving end gets, in order."""

    def offer(self, buffer: Buffer) -> bytes:
        """Sending end: make a buffer ready; what is returned travels with the message's header."""

    def send(self, buffer: Buffer) -> None:
        """Sending end: move a buffer that was offered; returns when it may be changed."""

    def receive(self, nbytes: int, place: bytes) -> Buffer:
        """Receiving end: the next buffer, complete; `place` is what `offer` returned."""

    def close(self) -> None:
        """Give everything back; whoever blocks should get an error soon."""


class Notes:
    """Keys and values that one end writes and both can read.

    Args:
        tell: Sends a note to the other end; from any thread.
        timeout_s: How long `get` waits.
    """

    def __init__(self, tell: Callable[[bytes], None], timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._listeners: dict[str, Callable[[bytes], None]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Write a note."""
        self._keep(key, value)
        self.send(key, value)

    def send(self, key: str, value: bytes) -> None:
        """Write a note that only the other end keeps."""
        self._tell(_NOTE.pack(len(key.encode())) + key.encode() + value)

    def get(self, key: str, *, forget: bool = False) -> bytes:
        """Read a note, waiting for it.

        Raises:
            Timeout: Nobody wrote it in time, or the connection is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._values, self.timeout_s)
            if key not in self._values:
                why = "the connection is gone" if self._closed else f"not in {self.timeout_s} s"
                raise Timeout(f"the other end did not say {key!r}: {why}", operation="setup")
            return self._values.pop(key) if forget else self._values[key]

    def on(self, key: str, listener: Callable[[bytes], None]) -> None:
        """Call `listener` for each note under this key, which is then not kept.

        It runs on the dispatching thread: it must not block.
        """
        self._listeners[key] = listener

    def heard(self, data: bytes) -> None:
        """A note of the other end has come.

        Raises:
            ProtocolError: It is none.
        """
        try:
            (size,) = _NOTE.unpack_from(data)
            key = data[_NOTE.size : _NOTE.size + size].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a note between carriers: {error}") from None
        self._keep(key, data[_NOTE.size + size :])

    def close(self) -> None:
        """Nothing will be heard any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _keep(self, key: str, value: bytes) -> None:
        listener = self._listeners.get(key)
        if listener is not None:
            listener(value)
            return
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()


Make = Callable[[Notes, bool], Carrier]
"""Makes one end of a carrier; True: the sending one. Called on the thread that uses it."""

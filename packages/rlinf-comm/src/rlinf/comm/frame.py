"""Frames: what goes over a byte stream. No I/O.

    frame  = prefix head body
    prefix = kind, flags, sizes of the head's parts, chunk, tag, ident, credit   (40 bytes)
    head   = service name, one descriptor a buffer, header (the codec's)
    body   = the buffers that travel inline, each padded to 16 bytes

A large body is not sent in one piece: the frame says CHUNKED, has no body, and is followed by
CHUNK frames, between which other frames may come. One such message is under way at a time.
"""

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rlinf.comm.address import WorkerId
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.handle import Handle
from rlinf.comm.window import Window

# Handshake; the only kinds before authentication. SIDE: see shm.
SIDE = 0
HELLO, CHALLENGE, PROVE, WELCOME, REFUSE = 1, 2, 3, 4, 5
# Payload.
MESSAGE, REQUEST, REPLY, ERROR = 10, 11, 12, 13
# Housekeeping.
CREDIT, WANT, BYE, IDLE, PING, CHUNK = 20, 21, 22, 23, 24, 25
# Buffers that go beside the connection.
CARRIED, NOTE = 26, 27
# Shared memory.
SEGMENT, RELEASE, DROP, END = 30, 31, 32, 33

PAYLOAD = frozenset({MESSAGE, REQUEST, REPLY, ERROR})
NAMES = {MESSAGE: "message", REQUEST: "request", REPLY: "reply", ERROR: "error"}

CHUNKED = 1
RAW = 4  # the header is the payload itself: bytes that need no encoding
SHORT = 16  # the header refers to a structure that was sent before on this connection
MANY = 8  # the header is a bundle of messages, each as the other flags say
PRIVATE = 2  # the receiver holds much of the sender's pool: it should copy at once

TEXT = 32  # the header is a string in UTF-8
NUMBER = 64  # the header is an int of 64 bits
BARE = RAW | TEXT | NUMBER
LONE = BARE | SHORT
"""What flags a frame may have that is one message and nothing else."""

PREFIX = struct.Struct("<BBHIIIqQQ")
INLINE = struct.Struct("<Q")
PLACED = struct.Struct("<QQQQ")  # segment (0: inline), offset, length, lease
ALIGN = 16
SHAKE_BYTES = 4096
ZEROS = bytes(ALIGN)

Place = tuple[int, int, int, int]


def padded(length: int) -> int:
    """A length rounded up to the alignment of buffers in a body."""
    return (length + ALIGN - 1) & -ALIGN


class Staged(Protocol):
    """Where a transport has put a buffer."""

    @property
    def segment(self) -> object:
        """The shared memory it lies in; None where it has not been put anywhere."""


def _is_safe(buffer: memoryview, place: Staged | None) -> bool:
    return isinstance(buffer.obj, bytes) or (place is not None and place.segment is not None)


def _copy(buffer: memoryview) -> memoryview:
    if isinstance(buffer, OnDevice):
        return buffer.copy()
    return memoryview(bytes(buffer))


class Outgoing:
    """A frame to send.

    Attributes:
        done: Completes when the buffers are no longer needed; None: they are copied if need be.
        beside: What a transport that carries buffers beside its connection made of it.
        cares: Fails if the frame cannot be sent; a frame whose `cares` is done is not sent.
        on_device: Whether some buffers are `OnDevice`.
        staged: Where a transport has put the buffers.
        twin: A frame of the same content, whose `staged` serves this one as well.
    """

    __slots__ = (
        "beside",
        "buffers",
        "cares",
        "done",
        "flags",
        "header",
        "ident",
        "kind",
        "nbytes",
        "on_device",
        "service",
        "staged",
        "tag",
        "twin",
    )

    def __init__(
        self,
        kind: int,
        header: bytes = b"",
        buffers: Sequence[memoryview] = (),
        *,
        tag: int = 0,
        ident: int = 0,
        service: bytes = b"",
    ) -> None:
        self.kind = kind
        self.header = header
        self.buffers = buffers
        self.tag = tag
        self.ident = ident
        self.service = service
        self.flags = 0
        self.nbytes = len(header)
        if buffers:
            self.nbytes += sum([buffer.nbytes for buffer in buffers])
        self.done: Handle[None] | None = None
        self.cares: Handle[Any] | None = None
        self.on_device = OnDevice in map(type, buffers)
        self.beside: object = None
        self.staged: Sequence[Staged] | None = None
        self.twin: Outgoing | None = None

    def own(self) -> None:
        """Copy the buffers that the sender may change."""
        places = self.staged or (None,) * len(self.buffers)
        self.buffers = tuple(
            buffer if _is_safe(buffer, place) else _copy(buffer)
            for buffer, place in zip(self.buffers, places, strict=True)
        )

    def lower(self) -> None:
        """Bring what is on a device to the host, once for all copies of a frame."""
        twin = self.twin
        if twin is not None and twin.buffers is self.buffers:
            twin.lower()
            self.buffers = twin.buffers
        else:
            self.buffers = tuple(
                b.to_host() if isinstance(b, OnDevice) else b for b in self.buffers
            )
        self.on_device = False

    def copy(self) -> "Outgoing":
        """The same content, to be sent to somebody else."""
        other = Outgoing(
            self.kind,
            self.header,
            self.buffers,
            tag=self.tag,
            ident=self.ident,
            service=self.service,
        )
        other.flags = self.flags
        other.staged = self.staged
        other.twin = self
        return other

    def order(self) -> tuple[int, int, bytes]:
        """Frames of equal order key are never reordered."""
        return (self.kind, self.tag, self.service)


class Incoming:
    """A frame that has arrived whole. The buffers are views on memory of their own.

    Attributes:
        source: Who sent it; set once that is known, as are the next two.
        window: What it has to be taken from when it is received.
        order: Its place among all messages of its mailbox.
        rest: The messages of a bundle that are still to be received; None where it is no bundle.
    """

    __slots__ = (
        "buffers",
        "credit",
        "flags",
        "header",
        "ident",
        "kind",
        "nbytes",
        "order",
        "places",
        "rest",
        "service",
        "source",
        "tag",
        "window",
    )

    def __init__(
        self, kind: int, tag: int, ident: int, credit: int, flags: int = 0, header: bytes = b""
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.tag = tag
        self.ident = ident
        self.credit = credit
        self.header = header
        self.nbytes = len(header)
        self.service = b""
        self.buffers: Sequence[memoryview] = ()
        self.places: Sequence[Place] = ()
        self.rest: deque[bytes] | None = None
        self.source: WorkerId
        self.window: Window
        self.order: int

    def unfold(self, messages: Iterable[bytes]) -> None:
        """Become the bundle of these."""
        self.rest = deque(messages)
        self.nbytes = sum(map(len, self.rest))

    def split(self) -> "Incoming":
        """The first message of a bundle, taken off it; what is no bundle is its own."""
        if self.rest is None:
            return self
        one = Incoming(self.kind, self.tag, 0, 0, self.flags, self.rest.popleft())
        one.source, one.window = self.source, self.window
        self.nbytes -= one.nbytes
        return one


def allocate(nbytes: int) -> memoryview:
    """Fresh private memory, not cleared."""
    return np.empty(nbytes, np.uint8).data

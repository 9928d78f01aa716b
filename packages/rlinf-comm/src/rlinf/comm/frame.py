"""Frames: what goes over a byte stream, and the Reader that finds them in it. No I/O.

    frame  = prefix head body
    prefix = kind, flags, sizes of the head's parts, chunk, tag, ident, credit   (40 bytes)
    head   = service name, one descriptor a buffer, header (the codec's)
    body   = the buffers that travel inline, each padded to 16 bytes

A large body is not sent in one piece: the frame says CHUNKED, has no body, and is followed by
CHUNK frames, between which other frames may come. One such message is under way at a time.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rlinf.comm.errors import ProtocolError
from rlinf.comm.handle import Handle

# Handshake; the only kinds before authentication.
HELLO, CHALLENGE, PROVE, WELCOME, REFUSE = 1, 2, 3, 4, 5
# Payload.
MESSAGE, REQUEST, REPLY, ERROR = 10, 11, 12, 13
# Housekeeping.
CREDIT, WANT, BYE, IDLE, PING, CHUNK = 20, 21, 22, 23, 24, 25
# Shared memory.
SEGMENT, RELEASE, DROP, END = 30, 31, 32, 33

PAYLOAD = frozenset({MESSAGE, REQUEST, REPLY, ERROR})
NAMES = {MESSAGE: "message", REQUEST: "request", REPLY: "reply", ERROR: "error"}

CHUNKED = 1
RAW = 4  # the header is the payload itself: bytes that need no encoding
PRIVATE = 2  # the receiver holds much of the sender's pool: it should copy at once

PREFIX = struct.Struct("<BBHIIIqQQ")
INLINE = struct.Struct("<Q")
PLACED = struct.Struct("<QQQQ")  # segment (0: inline), offset, length, lease
ALIGN = 16
SHAKE_BYTES = 4096
SCRATCH_BYTES = 1 << 16
DIRECT_BYTES = 1 << 14
GROUP_BYTES = 1 << 16
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


class Outgoing:
    """A frame to send.

    Attributes:
        done: Completes when the buffers are no longer needed; None: they are copied if need be.
        cares: Fails if the frame cannot be sent; a frame whose `cares` is done is not sent.
        staged: Where a transport has put the buffers.
        twin: A frame of the same content, whose `staged` serves this one as well.
    """

    __slots__ = (
        "buffers",
        "cares",
        "done",
        "flags",
        "header",
        "ident",
        "kind",
        "nbytes",
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
        self.staged: Sequence[Staged] | None = None
        self.twin: Outgoing | None = None

    def own(self) -> None:
        """Copy the buffers that the sender may change."""
        places = self.staged or (None,) * len(self.buffers)
        self.buffers = tuple(
            buffer if _is_safe(buffer, place) else memoryview(bytes(buffer))
            for buffer, place in zip(self.buffers, places, strict=True)
        )

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
    """A frame that has arrived whole. The buffers are views on memory of their own."""

    __slots__ = (
        "buffers",
        "credit",
        "flags",
        "header",
        "ident",
        "kind",
        "nbytes",
        "places",
        "service",
        "tag",
    )

    def __init__(self, kind: int, tag: int, ident: int, credit: int, flags: int = 0) -> None:
        self.kind = kind
        self.flags = flags
        self.tag = tag
        self.ident = ident
        self.credit = credit
        self.service = b""
        self.header = b""
        self.buffers: list[memoryview] = []
        self.places: list[Place] = []
        self.nbytes = 0


def allocate(nbytes: int) -> memoryview:
    """Fresh private memory, not cleared."""
    return np.empty(nbytes, np.uint8).data


class Body:
    """The memory an inline body is read into: small buffers share a block, large ones do not."""

    __slots__ = ("_at", "_blocks", "_pad", "buffers", "left")

    def __init__(
        self,
        sizes: Sequence[int],
        memory: Callable[[int], memoryview],
        pad: Callable[[int], int] = padded,
    ) -> None:
        self._pad = pad
        self.buffers: list[memoryview] = []
        self._blocks: list[memoryview] = []
        self._at = 0
        self.left = 0
        group: list[int] = []
        for size in sizes:
            if size >= GROUP_BYTES:
                self._add(group, memory)
                self._add([size], memory)
                group = []
            else:
                group.append(size)
        self._add(group, memory)
        self._blocks.reverse()

    def _add(self, sizes: list[int], memory: Callable[[int], memoryview]) -> None:
        total = sum(map(self._pad, sizes))
        if not sizes:
            return
        block = memory(total)
        start = 0
        for size in sizes:
            self.buffers.append(block[start : start + size])
            start += self._pad(size)
        if total:
            self._blocks.append(block)
            self.left += total

    def destination(self) -> memoryview:
        """The next contiguous piece to fill."""
        return self._blocks[-1][self._at :]

    def filled(self, count: int) -> None:
        """So many bytes were written to `destination`."""
        self._at += count
        self.left -= count
        if self._at == self._blocks[-1].nbytes:
            self._blocks.pop()
            self._at = 0


class Reader:
    """Turns a byte stream into frames. Feed: `space`, write into it, `filled`, then `next`.

    Args:
        placed: Whether descriptors are places (segment, offset, length) or only lengths.
        limit_bytes: A frame that claims more is a ProtocolError, before anything is allocated.
    """

    def __init__(self, *, placed: bool, limit_bytes: int) -> None:
        self._authenticated = self._quick = False
        self.memory: Callable[[int], memoryview] = allocate
        self._placed = placed
        self._limit = limit_bytes
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._pos = self._end = 0
        self._prefix: tuple[int, ...] | None = None
        self._head: Body | None = None
        self._frame: Incoming | None = None
        self._body: Body | None = None
        self._left = 0
        self._bulk: tuple[Incoming, Body] | None = None

    def authenticate(self) -> None:
        """Frames of all kinds and sizes may come from now on."""
        self._quick = self._limit >= SCRATCH_BYTES
        self._authenticated = True

    def space(self) -> memoryview:
        """Where to read to; never empty. Large bodies are read straight to where they stay."""
        if self._pos == self._end:
            self._pos = self._end = 0
            target = self._head if self._head is not None else self._body
            if target is not None and target.left >= DIRECT_BYTES:
                room = target.destination()
                return room if target is self._head else room[: self._left]
        elif self._pos and self._end > SCRATCH_BYTES // 2:
            size = self._end - self._pos
            self._scratch[:size] = bytes(self._scratch[self._pos : self._end])
            self._pos, self._end = 0, size
        return self._scratch[self._end :]

    def filled(self, room: memoryview, count: int) -> None:
        """`count` bytes were read into `room`, which `space` gave."""
        if room.obj is self._scratch.obj:
            self._end += count
        elif self._head is not None:
            self._head.filled(count)
        elif self._body is not None:
            self._body.filled(count)
            self._left -= count

    def next(self) -> Incoming | None:
        """The next whole frame, or None until more is read.

        Raises:
            ProtocolError: The bytes are no frame, or one larger than allowed.
        """
        while True:
            if self._prefix is None:
                pos = self._pos + PREFIX.size
                if self._end < pos:
                    return None
                self._prefix = prefix = PREFIX.unpack_from(self._scratch, self._pos)
                end = pos + prefix[2] + prefix[3]
                # Most frames are small, whole and without buffers.
                if not prefix[4] and end <= self._end and prefix[0] != CHUNK and self._quick:
                    return self._small(prefix, pos, end)
                self._pos = pos
                self._check(self._prefix)
            if self._body is None:
                head = self._take_head(self._prefix)
                if head is None:
                    return None
                self._begin(self._prefix, head)
            if self._left and not self._fill():
                return None
            frame = self._finish(self._prefix)
            if frame is not None:
                return frame

    def _small(self, prefix: tuple[int, ...], pos: int, end: int) -> Incoming:
        self._prefix = None
        self._pos = end
        kind, flags, service, header, _, _, tag, ident, credit = prefix
        frame = Incoming(kind, tag, ident, credit, flags)
        if service:
            frame.service = bytes(self._scratch[pos : pos + service])
        frame.header = bytes(self._scratch[pos + service : end])
        frame.nbytes = header
        return frame

    def _check(self, prefix: tuple[int, ...]) -> None:
        kind, _, service, header, count, chunk = prefix[:6]
        size = service + header + count * (PLACED.size if self._placed else INLINE.size)
        if not self._authenticated and (kind > REFUSE or size > SHAKE_BYTES or count or chunk):
            raise ProtocolError(f"a frame of kind {kind} and {size} bytes before authentication")
        if size > self._limit or chunk > self._limit:
            raise ProtocolError(
                f"a frame of {max(size, chunk)} bytes is over max_message_bytes={self._limit}"
            )
        if kind == CHUNK and (self._bulk is None or size or not chunk):
            raise ProtocolError("a chunk that belongs to no message")

    def _take_head(self, prefix: tuple[int, ...]) -> memoryview | None:
        if self._head is None:
            each = PLACED.size if self._placed else INLINE.size
            size = prefix[2] + prefix[3] + prefix[4] * each
            if self._end - self._pos >= size:
                head = self._scratch[self._pos : self._pos + size]
                self._pos += size
                return head
            if size <= SCRATCH_BYTES // 2:
                return None
            self._head = Body([size], allocate, pad=int)
        target = self._head
        while target.left and self._pos < self._end:
            self._copy(target, self._end - self._pos)
        if target.left:
            return None
        self._head = None
        return target.buffers[0]

    def _begin(self, prefix: tuple[int, ...], head: memoryview) -> None:
        kind, flags, service, _, count, chunk, tag, ident, credit = prefix
        if kind == CHUNK:
            assert self._bulk is not None
            self._frame, self._body = self._bulk
            self._left = chunk
            if chunk > self._body.left:
                raise ProtocolError("a chunk longer than the rest of its message")
            return
        frame = Incoming(kind, tag, ident, credit, flags)
        each = PLACED if self._placed else INLINE
        start = service + count * each.size
        frame.service = bytes(head[:service])
        frame.header = bytes(head[start:])
        sizes: list[int] = []
        if count and self._placed:
            frame.places = list(PLACED.iter_unpack(head[service:start]))
            sizes = [length for segment, _, length, _ in frame.places if not segment]
        elif count:
            sizes = list(struct.unpack_from(f"<{count}Q", head, service))
        frame.nbytes = len(frame.header) + sum(sizes)
        if frame.nbytes > self._limit:
            raise ProtocolError(
                f"a message of {frame.nbytes} bytes is over max_message_bytes={self._limit}"
            )
        self._frame, self._body = frame, Body(sizes, self.memory)
        self._left = self._body.left
        if flags & CHUNKED:
            if self._bulk is not None:
                raise ProtocolError("a second chunked message before the first was complete")
            self._bulk = (frame, self._body)
            self._left = 0

    def _fill(self) -> bool:
        assert self._body is not None
        while self._left and self._pos < self._end:
            self._left -= self._copy(self._body, min(self._left, self._end - self._pos))
        return not self._left

    def _copy(self, target: Body, limit: int) -> int:
        room = target.destination()
        count = min(limit, room.nbytes)
        room[:count] = self._scratch[self._pos : self._pos + count]
        self._pos += count
        target.filled(count)
        return count

    def _finish(self, prefix: tuple[int, ...]) -> Incoming | None:
        frame, body = self._frame, self._body
        assert frame is not None and body is not None
        self._prefix = self._frame = self._body = None
        if self._bulk is not None and frame is self._bulk[0]:
            if body.left:
                return None
            self._bulk = None
        frame.buffers = body.buffers
        return frame

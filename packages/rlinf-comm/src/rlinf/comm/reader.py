"""Reader: finds the frames in a byte stream. No I/O."""

import struct
from collections.abc import Callable, Sequence

from rlinf.comm.encoding.shorthand import Restorer
from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import (
    CHUNK,
    CHUNKED,
    INLINE,
    LONE,
    MESSAGE,
    PLACED,
    PREFIX,
    REFUSE,
    SHAKE_BYTES,
    SHORT,
    Incoming,
    allocate,
    padded,
)

SCRATCH_BYTES = 1 << 16
DIRECT_BYTES = 1 << 14
GROUP_BYTES = 1 << 16

Small = tuple[int, int, int, bytes]


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

    Attributes:
        memory: Where the memory of bodies comes from.
        pos, end: What is read and not taken yet; equal after a frame: `next` has no other.
    """

    def __init__(self, *, placed: bool, limit_bytes: int) -> None:
        self._authenticated = self._quick = False
        self.memory: Callable[[int], memoryview] = allocate
        self._restore = Restorer().restore
        self._placed = placed
        self._limit = limit_bytes
        self._scratch = allocate(SCRATCH_BYTES)  # not cleared: pages nobody needs are not there
        self.pos = self.end = 0
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
        if self.pos == self.end:
            self.pos = self.end = 0
            if self._prefix is None:
                return self._scratch
            target = self._head if self._head is not None else self._body
            if target is not None and target.left >= DIRECT_BYTES:
                room = target.destination()
                return room if target is self._head else room[: self._left]
        elif self.pos and self.end > SCRATCH_BYTES // 2:
            size = self.end - self.pos
            self._scratch[:size] = bytes(self._scratch[self.pos : self.end])
            self.pos, self.end = 0, size
        return self._scratch[self.end :]

    def filled(self, room: memoryview, count: int) -> None:
        """`count` bytes were read into `room`, which `space` gave."""
        if room is self._scratch or room.obj is self._scratch.obj:
            self.end += count
        elif self._head is not None:
            self._head.filled(count)
        elif self._body is not None:
            self._body.filled(count)
            self._left -= count

    def message(self, tag: int, receive: Callable[[memoryview], int]) -> Small | None:
        """Credit, ident, flags and header, if the next frame is a small message of this tag.

        If nothing is left of what was read before, `receive` is asked for more, once. None: `next`
        knows what it is.

        Raises:
            CodecError: As `next`.
        """
        if self._prefix is not None or not self._quick:
            return None
        scratch = self._scratch
        if self.pos == self.end:
            self.pos = self.end = 0
            self.end = receive(scratch)
        begin = self.pos + PREFIX.size
        if begin > self.end:
            return None
        prefix = PREFIX.unpack_from(scratch, self.pos)
        kind, flags, service, size, count, _, of, ident, credit = prefix
        end = begin + size
        if kind != MESSAGE or of != tag or count or service or flags & ~LONE or end > self.end:
            return None
        self.pos = end
        header = scratch[begin:end].tobytes()
        return credit, ident, flags, self._restore(header) if flags & SHORT else header

    def next(self) -> Incoming | None:
        """The next whole frame, or None until more is read.

        Raises:
            ProtocolError: The bytes are no frame, or one larger than allowed.
            CodecError: A header refers to a structure that was never sent.
        """
        while True:
            if self._prefix is None:
                scratch, pos = self._scratch, self.pos + PREFIX.size
                if self.end < pos:
                    return None
                self._prefix = prefix = PREFIX.unpack_from(scratch, self.pos)
                kind, flags, service, header, count, _, tag, ident, credit = prefix
                head = pos + service
                end = head + header
                # Most frames are small, whole and without buffers.
                if not count and end <= self.end and kind != CHUNK and self._quick:
                    self._prefix = None
                    self.pos = end
                    data = bytes(scratch[head:end])
                    if flags & SHORT:
                        data = self._restore(data)
                    frame = Incoming(kind, tag, ident, credit, flags, data)
                    if service:
                        frame.service = bytes(scratch[pos:head])
                    return frame
                self.pos = pos
                self._check(prefix)
            if self._body is None:
                found = self._take_head(self._prefix)
                if found is None:
                    return None
                self._begin(self._prefix, found)
            if self._left and not self._fill():
                return None
            whole = self._finish()
            if whole is not None:
                return whole

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
            if self.end - self.pos >= size:
                head = self._scratch[self.pos : self.pos + size]
                self.pos += size
                return head
            if size <= SCRATCH_BYTES // 2:
                return None
            self._head = Body([size], allocate, pad=int)
        target = self._head
        while target.left and self.pos < self.end:
            self._copy(target, self.end - self.pos)
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
        each = PLACED if self._placed else INLINE
        start = service + count * each.size
        data = bytes(head[start:])
        if flags & SHORT:
            data = self._restore(data)
        frame = Incoming(kind, tag, ident, credit, flags, data)
        frame.service = bytes(head[:service])
        sizes: list[int] = []
        if count and self._placed:
            frame.places = list(PLACED.iter_unpack(head[service:start]))
            sizes = [length for segment, _, length, _ in frame.places if not segment]
        elif count:
            sizes = list(struct.unpack_from(f"<{count}Q", head, service))
        frame.nbytes += sum(sizes)
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
        while self._left and self.pos < self.end:
            self._left -= self._copy(self._body, min(self._left, self.end - self.pos))
        return not self._left

    def _copy(self, target: Body, limit: int) -> int:
        room = target.destination()
        count = min(limit, room.nbytes)
        room[:count] = self._scratch[self.pos : self.pos + count]
        self.pos += count
        target.filled(count)
        return count

    def _finish(self) -> Incoming | None:
        frame, body = self._frame, self._body
        assert frame is not None and body is not None
        self._prefix = self._frame = self._body = None
        if self._bulk is not None and frame is self._bulk[0]:
            if body.left:
                return None
            self._bulk = None
        frame.buffers = body.buffers
        return frame

"""SendQueue: frames on their way into a byte stream, in what order and pieces. No I/O.

Small frames go in between the chunks of a large one, except those that must not overtake it
(same kind, tag and service).
"""

import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from rlinf.comm.encoding.shorthand import Shortener
from rlinf.comm.frame import (
    BARE,
    CHUNK,
    CHUNKED,
    MANY,
    PAYLOAD,
    PREFIX,
    SHORT,
    ZEROS,
    Outgoing,
    padded,
)

JOIN_BYTES = 1 << 12

Piece = memoryview | bytes


class Entry:
    """Bytes about to leave, whose they are, and whether their end ends the frame.

    Attributes:
        fd: A descriptor that is to be with the peer before these bytes are.
        keep: What keeps it open.
    """

    __slots__ = ("data", "fd", "frame", "keep", "last")

    def __init__(self, data: Piece, frame: Outgoing, last: bool) -> None:
        self.data = data
        self.frame = frame
        self.last = last
        self.fd: int | None = None
        self.keep: object = None


class Encoder:
    """Turns a frame into bytes. This one sends all buffers inline.

    Attributes:
        credit: See `Link.credit`.
    """

    def __init__(self) -> None:
        self.credit: Callable[[], int] = int
        self._shorten = Shortener().shorten

    def count(self, frame: Outgoing) -> int:
        """How many descriptors the frame has."""
        return len(frame.buffers)

    def inline(self, frame: Outgoing) -> Sequence[memoryview]:
        """The buffers that go over the stream."""
        return frame.buffers

    def descriptors(self, frame: Outgoing) -> bytes:
        """One for each buffer."""
        return struct.pack(f"<{len(frame.buffers)}Q", *[b.nbytes for b in frame.buffers])

    def flags(self, frame: Outgoing) -> int:
        """Flags beyond those of the queue itself."""
        return 0

    def before(self, frame: Outgoing) -> list[Entry]:
        """What the peer has to be told before this frame."""
        return []

    def short(self, flags: int, header: bytes) -> tuple[int, bytes]:
        """The flags and header of payload that leaves now, its structure sent once."""
        if flags & (BARE | MANY):
            return flags, header
        short = self._shorten(header)
        return (flags, header) if short is header else (flags | SHORT, short)

    def head(self, frame: Outgoing, flags: int = 0) -> bytes:
        """Prefix and head of a frame."""
        kind, service = frame.kind, frame.service
        flags |= frame.flags
        header = frame.header
        if kind in PAYLOAD:
            flags, header = self.short(flags, header)
        sizes = len(service), len(header)
        if not frame.buffers:
            prefix = PREFIX.pack(kind, flags, *sizes, 0, 0, frame.tag, frame.ident, self.credit())
            return b"".join((prefix, service, header))
        flags |= self.flags(frame)
        rows = self.descriptors(frame)
        prefix = PREFIX.pack(
            kind, flags, *sizes, self.count(frame), 0, frame.tag, frame.ident, self.credit()
        )
        return b"".join((prefix, service, rows, header))

    def chunk(self, size: int) -> bytes:
        """The prefix of a chunk; it carries no credit, for it is no frame to its reader."""
        return PREFIX.pack(CHUNK, 0, 0, 0, 0, size, 0, 0, 0)


class SendQueue:
    """Guarded by its owner's lock.

    Args:
        encoder: Turns frames into bytes.
        chunk_bytes: Size of the pieces of a large body.
    """

    def __init__(self, encoder: Encoder, chunk_bytes: int) -> None:
        self.wire: deque[Entry] = deque()
        self._encoder = encoder
        self._chunk = chunk_bytes
        self._small: deque[Outgoing] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._orders: Counter[tuple[int, int, bytes]] = Counter()
        self._rest: deque[Piece] | None = None

    def __bool__(self) -> bool:
        return bool(self.wire or self._small or self._bulk)

    def add(self, frame: Outgoing) -> None:
        """Queue a frame, behind those it must not overtake."""
        if self._bulk or frame.buffers:
            body = sum([buffer.nbytes for buffer in self._encoder.inline(frame)])
            order = frame.order()
            if body > self._chunk or self._orders.get(order):
                self._bulk.append(frame)
                self._orders[order] += 1
                return
        self._small.append(frame)

    def refill(self) -> bool:
        """Put what is to leave next into `wire`, if that is empty; says whether there is any."""
        if not self.wire:
            while self._small:
                self._commit(self._small.popleft())
            if self._bulk:
                self._commit_bulk(self._bulk[0])
        return bool(self.wire)

    def written(self, count: int) -> Iterator[Outgoing]:
        """That many bytes of `wire` have left; yields the frames that are thereby gone."""
        wire = self.wire
        while wire:
            entry = wire[0]
            size = len(entry.data) if isinstance(entry.data, bytes) else entry.data.nbytes
            if count < size:
                if count:
                    entry.data = memoryview(entry.data)[count:]
                return
            count -= size
            wire.popleft()
            if entry.last:
                yield entry.frame

    def keep(self, frame: Outgoing) -> None:
        """Copy what is still queued of a frame whose buffers may be changed from now on."""
        if self._bulk and frame is self._bulk[0] and self._rest is not None:
            self._rest = deque(_copy(piece) for piece in self._rest)
        elif frame in self._bulk or frame in self._small:
            frame.own()
        for entry in self.wire:
            if entry.frame is frame:
                entry.data = _copy(entry.data)

    def clear(self, *, whole: bool) -> list[Outgoing]:
        """Drop everything (`whole`), or what has not been started; returns the frames dropped."""
        frames = [*self._bulk, *self._small]
        if whole:
            frames += [entry.frame for entry in self.wire]
            self.wire.clear()
        self._small.clear()
        self._bulk.clear()
        self._orders.clear()
        self._rest = None
        return list({id(frame): frame for frame in frames}.values())

    def _commit(self, frame: Outgoing) -> None:
        if frame.buffers:
            self.wire.extend(self._encoder.before(frame))
            self._append(self._encoder.head(frame), self._pieces(frame), frame, last=True)
        else:
            self.wire.append(Entry(self._encoder.head(frame), frame, True))

    def _pieces(self, frame: Outgoing) -> list[Piece]:
        pieces: list[Piece] = []
        for buffer in self._encoder.inline(frame):
            size = buffer.nbytes
            if size:
                pieces.append(buffer)
            if padded(size) != size:
                pieces.append(ZEROS[: padded(size) - size])
        return pieces

    def _append(self, head: bytes, pieces: list[Piece], frame: Outgoing, *, last: bool) -> None:
        if pieces and sum(map(len, pieces)) <= JOIN_BYTES:
            head, pieces = b"".join((head, *pieces)), []
        self.wire.append(Entry(head, frame, last and not pieces))
        for index, piece in enumerate(pieces, 1):
            self.wire.append(Entry(piece, frame, last and index == len(pieces)))

    def _commit_bulk(self, frame: Outgoing) -> None:
        """The next chunk of a large frame, or a small one that waits in its queue."""
        if self._rest is None:
            self.wire.extend(self._encoder.before(frame))
            pieces = self._pieces(frame)
            if sum(map(len, pieces)) <= self._chunk:
                self._append(self._encoder.head(frame), pieces, frame, last=True)
                self._end_bulk(frame)
                return
            self._append(self._encoder.head(frame, CHUNKED), [], frame, last=False)
            self._rest = deque(pieces)
        chunk, size = self._cut(self._rest)
        self._append(self._encoder.chunk(size), chunk, frame, last=not self._rest)
        if not self._rest:
            self._end_bulk(frame)

    def _cut(self, rest: deque[Piece]) -> tuple[list[Piece], int]:
        """The pieces of one chunk, taken off `rest`, and their size."""
        chunk: list[Piece] = []
        size = 0
        while rest and size < self._chunk:
            piece = memoryview(rest[0])
            room = self._chunk - size
            if piece.nbytes > room:
                rest[0] = piece[room:]
                piece = piece[:room]
            else:
                rest.popleft()
            chunk.append(piece)
            size += piece.nbytes
        return chunk, size

    def _end_bulk(self, frame: Outgoing) -> None:
        self._rest = None
        self._bulk.popleft()
        order = frame.order()
        self._orders[order] -= 1
        if not self._orders[order]:
            del self._orders[order]


def _copy(piece: Piece) -> Piece:
    if isinstance(piece, bytes) or isinstance(piece.obj, bytes):
        return piece
    return memoryview(bytes(piece))

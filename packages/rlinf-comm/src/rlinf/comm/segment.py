"""Segments: pieces of shared memory (memfd), ours and those of others, found by address.

Ours is mapped shared and writable. Theirs is mapped private (copy on write), so that whoever
receives an array from it may write to it like to any array of its own: the first write to a page
gives this process its own copy of that page, and neither the sender nor other receivers see it.
A page so copied no longer shows what the sender writes next, so before memory goes back to its
sender `restore` looks for copied pages (in /proc/self/pagemap) and lets go of them. It need not
look where this process has had no page fault at all since it got the memory (`faults`). Mapping
read-only instead would force a copy on every torch tensor, which has no read-only flag; measured,
that costs ten times what the look costs.

The sender seals its memfd: nobody else can ever map it writable, nor can it be shrunk under a
reader (which would kill the reader).
"""

import bisect
import contextlib
import fcntl
import functools
import mmap
import os
import resource
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from rlinf.comm.errors import PoolExhausted, ProtocolError

PAGE = mmap.PAGESIZE
POPULATE_WRITE = 23
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10
# Pagemap entries whose top bits say "not there" or "page of a file": everything else is a copy.
_CLEAN = bytes(value for value in range(256) if value & 0xE0 in (0x00, 0xA0))


class Segment:
    """A mapped piece of shared memory.

    Attributes:
        uid: Its identity, unique among all hosts.
        fd: Its memfd.
        size: In bytes.
        memory: Its mapping.
        address: Where that begins.
    """

    __slots__ = ("__weakref__", "address", "fd", "memory", "size", "uid")

    own: ClassVar[bool]

    def __init__(self, uid: int, fd: int, size: int, memory: mmap.mmap) -> None:
        self.uid = uid
        self.fd = fd
        self.size = size
        self.memory = memory
        self.address = address_of(memoryview(memory))
        ATLAS.add(self)

    def __del__(self) -> None:
        # The mapping itself goes with the last array that lies in it.
        ATLAS.remove(self)
        os.close(self.fd)

    def slice(self, offset: int, length: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Bytes of it as an array, which keeps the mapping (not the segment) alive."""
        return np.frombuffer(self.memory, np.uint8, length, offset)

    def populate(self, offset: int, length: int) -> None:
        """Get the pages from the system now; failing here is an error, and later a SIGBUS.

        Raises:
            PoolExhausted: There is not that much memory.
        """
        try:
            self.memory.madvise(POPULATE_WRITE, offset, length)
        except OSError as error:
            if error.errno != 22:  # EINVAL: before Linux 5.14, where writing must do
                raise _refused(length, error) from None

    def is_pristine(self, offset: int, length: int) -> bool:
        """Whether what this process sees there is what everybody sees."""
        return True


class OwnSegment(Segment):
    """A segment of this process: shared, writable."""

    __slots__ = ()
    own = True

    @classmethod
    def create(cls, size: int) -> "OwnSegment":
        """A new one; its pages cost nothing until they are populated.

        Raises:
            PoolExhausted: The system refuses (descriptors, address space or file size limit).
        """
        try:
            fd = os.memfd_create("rlinf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _refused(size, error) from None
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise _refused(size, error) from None
        fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE)
        return cls(secrets.randbits(63) | 1, fd, size, memory)


class AnonymousSegment(Segment):
    """Memory that no other process can see."""

    __slots__ = ()
    own = True

    def __init__(self, size: int, memory: mmap.mmap) -> None:
        self.uid, self.fd, self.size, self.memory = 0, -1, size, memory
        self.address = address_of(memoryview(memory))

    def __del__(self) -> None:
        # Neither a descriptor to close nor an entry in the atlas.
        return

    @classmethod
    def create(cls, size: int) -> "AnonymousSegment":
        """A new one; its pages cost nothing until they are populated.

        Raises:
            PoolExhausted: The system refuses.
        """
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise _refused(size, error) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(size, memory)


class ForeignSegment(Segment):
    """A segment of another process: private, copy on write.

    Pages are handed out to one array at a time: two on the same page would see each other's
    writes. What `hold` refuses is to be read with `copy`.
    """

    __slots__ = ("_ends", "_starts")
    own = False

    def __init__(self, uid: int, fd: int, size: int, memory: mmap.mmap) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        super().__init__(uid, fd, size, memory)

    @classmethod
    def attach(cls, uid: int, fd: int, size: int) -> "ForeignSegment":
        """Map what a peer has passed; takes the descriptor over.

        Raises:
            ProtocolError: It is smaller than claimed, or could be shrunk while it is read.
        """
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
            if os.fstat(fd).st_size < size or not seals & SEAL_SHRINK:
                raise ProtocolError(f"a peer passed a segment that is not {size} sealed bytes")
            return cls(uid, fd, size, mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"cannot map a peer's segment of {size} bytes: {error}") from None
        except ProtocolError:
            os.close(fd)
            raise

    def is_pristine(self, offset: int, length: int) -> bool:
        """Whether no page there was written to by this process."""
        pages = _pagemap()
        if pages is None:
            return False
        first = (self.address + offset) // PAGE
        count = (self.address + offset + length - 1) // PAGE - first + 1
        entries = os.pread(pages, 8 * count, 8 * first)
        return len(entries) == 8 * count and not entries[7::8].translate(None, _CLEAN)

    def hold(self, offset: int, length: int) -> bool:
        """Reserve the pages for an array; False if another one lies on one of them."""
        start, end = offset // PAGE, (offset + length - 1) // PAGE + 1
        index = bisect.bisect(self._starts, start)
        if index and self._ends[index - 1] > start:
            return False
        if index < len(self._starts) and self._starts[index] < end:
            return False
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        return True

    def restore(self, places: Iterable[tuple[int, int]], *, written: bool = True) -> None:
        """The arrays that held these (offset, length) are gone: what they wrote is let go of.

        Unless it is known that nothing was written.
        """
        for start, end in _merged(places):
            if written and not self.is_pristine(start * PAGE, (end - start) * PAGE):
                self.memory.madvise(mmap.MADV_DONTNEED, start * PAGE, (end - start) * PAGE)
            first = bisect.bisect_left(self._starts, start)
            last = bisect.bisect_left(self._starts, end)
            del self._starts[first:last], self._ends[first:last]

    def copy(self, offset: int, length: int) -> memoryview:
        """What the sender wrote there, in private memory."""
        target = np.empty(length, np.uint8).data
        done = 0
        while done < length:
            count = os.preadv(self.fd, [target[done:]], offset + done)
            if not count:
                raise ProtocolError("a peer's segment is shorter than it was")
            done += count
        return target


def _merged(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs of pages, first and behind the last, that the places lie on."""
    pages = sorted((offset // PAGE, (offset + length - 1) // PAGE + 1) for offset, length in places)
    first, last = pages[0]
    for start, end in pages:
        if start > last:
            yield first, last
            first = start
        last = end
    yield first, last


class Atlas:
    """All segments this process has mapped, by address; thread-safe, and safe in finalizers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._segments: list[weakref.ref[Segment]] = []

    def add(self, segment: Segment) -> None:
        """A segment was mapped."""
        with self._lock:
            index = bisect.bisect(self._starts, segment.address)
            self._starts.insert(index, segment.address)
            self._segments.insert(index, weakref.ref(segment))

    def remove(self, segment: Segment) -> None:
        """A segment is no longer known (its memory may live on in arrays)."""
        with self._lock:
            index = bisect.bisect_left(self._starts, segment.address)
            for place in range(index, len(self._starts)):
                if self._starts[place] != segment.address:
                    return
                found = self._segments[place]()
                if found is None or found is segment:
                    del self._starts[place], self._segments[place]
                    return

    def find(self, address: int, length: int) -> Segment | None:
        """The segment these bytes lie in, if any."""
        if not self._starts:
            return None
        with self._lock:
            index = bisect.bisect(self._starts, address) - 1
            segment = self._segments[index]() if index >= 0 else None
        if segment is None or address + length > segment.address + segment.size:
            return None
        return segment


ATLAS = Atlas()


def faults() -> int:
    """Page faults of this process so far; the first write to a page it shares is one of them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer begins."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def missing() -> str | None:
    """Why there is no sealed shared memory on this system; None where there is."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    if _pagemap() is None:
        return "/proc/self/pagemap cannot be read here"
    return None


@functools.cache
def _pagemap() -> int | None:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _refused(size: int, error: Exception) -> PoolExhausted:
    return PoolExhausted(
        f"the system does not give {size} bytes of shared memory: {error}. "
        "Lower pool_bytes, or raise the limit (ulimit -v, ulimit -n, the container's memory)",
        needed_bytes=size,
    )

"""cuda_ipc: tensors between processes that use one GPU (or two with peer access), on the device.

The sender copies a tensor into a segment of device memory that it has exported, and the receiver
out of it into memory of its own, each copy at the speed of the device. So a sender's memory is
never held by a receiver, whatever allocator it came from, and each segment is exported and opened
once. Events order the copies: the receiver's waits for the sender's, and a segment is written
again only after the receiver has said that it has read it. Headers and host memory go by shm.

    place = number of the segment, its size, memory handle, event handle
"""

import importlib
import importlib.util
import itertools
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from rlinf.comm.config import CommConfig
from rlinf.comm.device import Device
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.errors import PoolExhausted, ProtocolError
from rlinf.comm.transports.base import Transport
from rlinf.comm.transports.carrier import Buffer, Carrier, Notes
from rlinf.comm.transports.carrying import CarryingTransport
from rlinf.comm.transports.nccl import Streamed, missing_cuda, unsuited_cuda
from rlinf.comm.transports.shm import ShmTransport

_PLACE: Final = struct.Struct("<QQ64s64s")
_NUMBER: Final = struct.Struct("<Q")
LEAST_BYTES: Final = 1 << 16
LIMIT_BYTES: Final = 1 << 30
"""How much device memory one direction of a pair holds, where `pool_bytes` does not say less."""


class Export(Protocol):
    """A segment of this process's.

    Attributes:
        memory, event: Their handles, 64 bytes each.
    """

    memory: bytes
    event: bytes

    def write(self, buffer: OnDevice) -> None:
        """Begin to copy a buffer in, after what it waits for."""

    def written(self) -> None:
        """Wait until that is done."""

    def free(self) -> None:
        """Give the memory back. The other side has closed it, or is gone."""


class Import(Protocol):
    """A segment of another process's, opened here."""

    def read(self, nbytes: int) -> OnDevice:
        """Copy out, after the last write; complete when it returns."""

    def close(self) -> None:
        """Unmap it."""


class Cuda(Protocol):
    """What is needed of CUDA."""

    def export(self, nbytes: int) -> Export:
        """New device memory, and an event that goes with it."""

    def open(self, memory: bytes, event: bytes) -> Import:
        """Memory and event of another process."""


class Segments:
    """The exported segments of one direction: one buffer in each, sizes in powers of two.

    Args:
        make: Makes one of a size.
        dropped: Told the number of a segment that is to be closed by the other side.
        limit_bytes: How much there may be (one buffer that is larger may be alone).
        timeout_s: How long to wait for room.
    """

    def __init__(
        self,
        make: Callable[[int], Export],
        dropped: Callable[[int], None],
        limit_bytes: int,
        timeout_s: float | None,
    ) -> None:
        self.nbytes = 0
        self._make = make
        self._dropped = dropped
        self._limit = limit_bytes
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._lent: dict[int, tuple[int, Export]] = {}
        self._free: OrderedDict[int, tuple[int, Export]] = OrderedDict()
        self._dropping: dict[int, tuple[int, Export]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def take(self, nbytes: int) -> tuple[int, int, Export]:
        """A segment that is large enough: number, size, segment. Waits for room.

        Raises:
            PoolExhausted: None was given back in time, or the connection is gone.
        """
        size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        with self._changed:
            fits = self._changed.wait_for(lambda: self._closed or self._room(size), self._timeout_s)
            if self._closed or not fits:
                raise PoolExhausted(
                    f"no room for {nbytes} bytes on the device: {self.nbytes} of {self._limit} are "
                    f"exported, {len(self._lent)} segments not read yet",
                    needed_bytes=nbytes,
                    limit_bytes=self._limit,
                )
            number = next((n for n, (have, _) in self._free.items() if have == size), None)
            if number is None:
                number, segment = next(self._numbers), self._make(size)
                self.nbytes += size
            else:
                _, segment = self._free.pop(number)
            self._lent[number] = (size, segment)
            return number, size, segment

    def give_back(self, number: int) -> None:
        """The other side has read it."""
        with self._changed:
            lent = self._lent.pop(number, None)
            if lent is not None:
                self._free[number] = lent
                self._changed.notify_all()

    def closed(self, number: int) -> None:
        """The other side has closed it, as it was told to."""
        with self._changed:
            dropped = self._dropping.pop(number, None)
            if dropped is not None:
                self.nbytes -= dropped[0]
                dropped[1].free()
                self._changed.notify_all()

    def counts(self) -> tuple[int, int]:
        """How many are exported, and how many of them hold what was not read yet."""
        with self._changed:
            return len(self._lent) + len(self._free) + len(self._dropping), len(self._lent)

    def close(self) -> None:
        """Free all: the other side has closed its own, or is gone."""
        with self._changed:
            self._closed = True
            for segments in (self._lent, self._free, self._dropping):
                for _, segment in segments.values():
                    segment.free()
                segments.clear()
            self.nbytes = 0
            self._changed.notify_all()

    def _room(self, size: int) -> bool:
        """Under the lock. Asks for the oldest free segments to be closed if they are in the way."""
        if any(have == size for have, _ in self._free.values()):
            return True
        if self.nbytes + size <= self._limit or not self.nbytes:
            return True
        while self._free:
            number, dropped = self._free.popitem(last=False)
            self._dropping[number] = dropped
            self._dropped(number)
        return False


class IpcSender:
    """The sending end of a direction."""

    def __init__(self, notes: Notes, cuda: Cuda, limit_bytes: int) -> None:
        def drop(number: int) -> None:
            notes.send("drop", _NUMBER.pack(number))

        self._writing: deque[Export] = deque()
        self.segments = Segments(cuda.export, drop, limit_bytes, notes.timeout_s)
        notes.on("read", lambda note: self.segments.give_back(*_NUMBER.unpack(note)))
        notes.on("closed", lambda note: self.segments.closed(*_NUMBER.unpack(note)))

    def offer(self, buffer: Buffer) -> bytes:
        """Write it into a segment."""
        number, size, segment = self.segments.take(buffer.nbytes)
        segment.write(buffer)
        self._writing.append(segment)
        return _PLACE.pack(number, size, segment.memory, segment.event)

    def send(self, buffer: Buffer) -> None:
        """It may be changed once it is in its segment; the receiver waits for the same event."""
        self._writing.popleft().written()

    def receive(self, nbytes: int, place: bytes) -> Buffer:
        """It only sends."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the segments."""
        self.segments.close()


class IpcReceiver:
    """The receiving end of a direction."""

    def __init__(self, notes: Notes, cuda: Cuda) -> None:
        self._notes = notes
        self._cuda = cuda
        self._opened: dict[int, Import] = {}
        self._dropped: list[int] = []
        notes.on("drop", lambda note: self._drop(*_NUMBER.unpack(note)))
        self._lock = threading.Lock()

    def offer(self, buffer: Buffer) -> bytes:
        """It only receives."""
        raise NotImplementedError

    def send(self, buffer: Buffer) -> None:
        """It only receives."""
        raise NotImplementedError

    def receive(self, nbytes: int, place: bytes) -> OnDevice:
        """Copy it out, and say so."""
        try:
            number, size, memory, event = _PLACE.unpack(place)
        except struct.error as error:
            raise ProtocolError(f"not a place in device memory: {error}") from None
        if nbytes > size:
            raise ProtocolError(f"{nbytes} bytes in a segment of {size}")
        with self._lock:
            opened = self._opened.get(number)
            if opened is None:
                opened = self._opened[number] = self._cuda.open(memory, event)
            buffer = opened.read(nbytes)
        self._notes.send("read", _NUMBER.pack(number))
        return buffer

    def count(self) -> int:
        """How many segments are open."""
        return len(self._opened)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].close()

    def _drop(self, number: int) -> None:
        """On the dispatching thread; a dropped segment is not being read."""
        with self._lock:
            opened = self._opened.pop(number, None)
            if opened is not None:
                opened.close()
        self._notes.send("closed", _NUMBER.pack(number))


class CudaIpcTransport(CarryingTransport):
    """See the module."""

    name = "cuda_ipc"
    scheme = "cuda-ipc"
    kinds = frozenset({"cuda"})
    inner: type[Transport] = ShmTransport

    @classmethod
    def missing(cls) -> str | None:
        """Needs an NVIDIA driver, torch, cupy, and what shm needs."""
        if missing_cuda() is None and not importlib.util.find_spec("cupy"):
            return "cupy is not installed"
        return missing_cuda() or ShmTransport.missing()

    @classmethod
    def unsuited(cls, device: Device, config: CommConfig) -> str | None:
        """Only for workers on a GPU."""
        return unsuited_cuda(device)

    def cuda(self) -> Cuda:
        """What moves the memory."""
        return CupyCuda(self.surroundings.device)

    def carries(self, buffer: Buffer) -> bool:
        """What is on the device."""
        return type(buffer) is OnDevice

    def make(self, notes: Notes, sending: bool) -> Carrier:
        """One end."""
        if not sending:
            return IpcReceiver(notes, self.cuda())
        limit = self.surroundings.config.pool_bytes or LIMIT_BYTES
        return IpcSender(notes, self.cuda(), min(limit, LIMIT_BYTES))


class CupyCuda:
    """The CUDA runtime by cupy; copies run on a stream of torch's."""

    def __init__(self, device: Device) -> None:
        self.runtime = importlib.import_module("cupy").cuda.runtime
        self.runtime.setDevice(device.index)
        self.on = Streamed(device)

    def export(self, nbytes: int) -> "CupyExport":
        """cudaMalloc, and an event that other processes can wait for."""
        return CupyExport(self, nbytes)

    def open(self, memory: bytes, event: bytes) -> "CupyImport":
        """Map them here."""
        return CupyImport(self, memory, event)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """On the stream."""
        kind = self.runtime.memcpyDeviceToDevice
        self.runtime.memcpyAsync(to, source, nbytes, kind, self.on.stream.cuda_stream)


class CupyExport:
    """See `Export`."""

    def __init__(self, cuda: CupyCuda, nbytes: int) -> None:
        runtime = cuda.runtime
        self._cuda = cuda
        self._pointer = runtime.malloc(nbytes)
        flags = runtime.eventDisableTiming | runtime.eventInterprocess
        self._event = runtime.eventCreateWithFlags(flags)
        self.memory: bytes = runtime.ipcGetMemHandle(self._pointer)
        self.event: bytes = runtime.ipcGetEventHandle(self._event)

    def write(self, buffer: OnDevice) -> None:
        """Ordered after `buffer.ready`."""
        stream = self._cuda.on.stream
        if buffer.ready is not None:
            stream.wait_event(buffer.ready)
        self._cuda.copy(self._pointer, buffer.tensor.data_ptr(), buffer.nbytes)
        self._cuda.runtime.eventRecord(self._event, stream.cuda_stream)
        buffer.tensor.record_stream(stream)

    def written(self) -> None:
        """By the event."""
        self._cuda.runtime.eventSynchronize(self._event)

    def free(self) -> None:
        """Event and memory."""
        self._cuda.runtime.eventDestroy(self._event)
        self._cuda.runtime.free(self._pointer)


class CupyImport:
    """See `Import`."""

    def __init__(self, cuda: CupyCuda, memory: bytes, event: bytes) -> None:
        self._cuda = cuda
        self._pointer = cuda.runtime.ipcOpenMemHandle(memory)
        self._event = cuda.runtime.ipcOpenEventHandle(event)

    def read(self, nbytes: int) -> OnDevice:
        """Ordered after the write."""
        on = self._cuda.on
        tensor: Any = on.empty(nbytes)
        self._cuda.runtime.streamWaitEvent(on.stream.cuda_stream, self._event)
        self._cuda.copy(tensor.data_ptr(), self._pointer, nbytes)
        on.stream.synchronize()
        return OnDevice(tensor)

    def close(self) -> None:
        """Event and memory."""
        self._cuda.runtime.eventDestroy(self._event)
        self._cuda.runtime.ipcCloseMemHandle(self._pointer)

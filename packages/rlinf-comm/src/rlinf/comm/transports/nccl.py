"""nccl: tensors from GPU to GPU; everything else, and all headers, over TCP.

A communicator of two is made for a pair and a direction when the first tensor goes that way; its
unique id goes over the pair's own connection, so workers come and go as they like. cupy's binding
of NCCL where cupy is installed, else torch's ProcessGroupNCCL.

Streams: what the sender's current stream has under way when `send` is called comes first; a
received tensor is complete before it is delivered, so any stream may use it.
"""

import contextlib
import importlib
import importlib.util
import struct
from pathlib import Path
from typing import Any, Final, Protocol

from rlinf.comm.config import CommConfig
from rlinf.comm.device import Device
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.transports.base import Transport
from rlinf.comm.transports.carrier import Buffer, Carrier, Notes
from rlinf.comm.transports.carrying import CarryingTransport
from rlinf.comm.transports.gloo import RECEIVER, SENDER, encryption, store
from rlinf.comm.transports.tcp import TcpTransport

DRIVER: Final = Path("/proc/driver/nvidia/version")
_ID: Final = struct.Struct("128b")


class Communicator(Protocol):
    """Two GPUs; one end sends and the other receives, one after the other."""

    def send(self, buffer: OnDevice) -> None:
        """Send; returns when the memory may be changed."""

    def receive(self, nbytes: int) -> OnDevice:
        """Receive; complete when it returns."""

    def abort(self) -> None:
        """End what is under way with an error, at this end."""


class Library(Protocol):
    """A binding of NCCL."""

    def join(self, notes: Notes, rank: int, device: Device) -> Communicator:
        """Make one end; returns when the other one is there, too."""


class NcclCarrier:
    """One end of a direction."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def offer(self, buffer: Buffer) -> bytes:
        """Nothing to prepare."""
        return b""

    def send(self, buffer: Buffer) -> None:
        """Send one."""
        self._communicator.send(buffer)

    def receive(self, nbytes: int, place: bytes) -> OnDevice:
        """Receive one."""
        return self._communicator.receive(nbytes)

    def close(self) -> None:
        """Whoever blocks gets an error."""
        self._communicator.abort()


class NcclTransport(CarryingTransport):
    """See the module."""

    name = "nccl"
    scheme = "nccl"
    kinds = frozenset({"cuda"})
    inner: type[Transport] = TcpTransport

    @classmethod
    def missing(cls) -> str | None:
        """Needs an NVIDIA driver and torch."""
        return missing_cuda()

    @classmethod
    def unsuited(cls, device: Device, config: CommConfig) -> str | None:
        """Only for workers on a GPU."""
        return encryption(config) or unsuited_cuda(device) or _no_nccl()

    def library(self) -> Library:
        """The binding to use."""
        return CupyLibrary() if importlib.util.find_spec("cupy") else TorchLibrary()

    def carries(self, buffer: Buffer) -> bool:
        """What is on the device."""
        return type(buffer) is OnDevice

    def make(self, notes: Notes, sending: bool) -> Carrier:
        """Meet the other end."""
        rank = SENDER if sending else RECEIVER
        return NcclCarrier(self.library().join(notes, rank, self.surroundings.device))


def missing_cuda() -> str | None:
    """Why nothing of CUDA can work on this host, found out without loading it."""
    if not DRIVER.exists():
        return "there is no NVIDIA driver on this host"
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def unsuited_cuda(device: Device) -> str | None:
    """Why a worker on this device does without CUDA; loads torch if it is a cuda device."""
    if device.kind != "cuda":
        return f"the worker is on {device}"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None


def _no_nccl() -> str | None:
    if importlib.util.find_spec("cupy"):
        return None
    available = importlib.import_module("torch.distributed").is_nccl_available()
    return None if available else "neither cupy nor a torch with NCCL is installed"


class Streamed:
    """A stream of its own, ordered with the ones that use the memory.

    Args:
        device: Of the worker.
    """

    def __init__(self, device: Device) -> None:
        self.torch = importlib.import_module("torch")
        self.device = f"cuda:{device.index}"
        self.torch.cuda.set_device(self.device)
        self.stream = self.torch.cuda.Stream(self.device)

    def empty(self, nbytes: int) -> Any:
        """Memory that the stream may write to: what used it before is waited for."""
        tensor = self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)
        self.stream.wait_stream(self.torch.cuda.current_stream(self.device))
        return tensor


class CupyLibrary:
    """cupy.cuda.nccl."""

    def join(self, notes: Notes, rank: int, device: Device) -> "CupyCommunicator":
        """The unique id is the sender's."""
        nccl = importlib.import_module("cupy.cuda.nccl")
        if rank == SENDER:
            unique = nccl.get_unique_id()
            notes.set("id", _ID.pack(*unique))
        else:
            unique = _ID.unpack(notes.get("id"))
        importlib.import_module("cupy").cuda.Device(device.index).use()
        return CupyCommunicator(nccl, nccl.NcclCommunicator(2, unique, rank), Streamed(device))


class CupyCommunicator:
    """See `Communicator`."""

    def __init__(self, nccl: Any, communicator: Any, streamed: Streamed) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._on = streamed

    def send(self, buffer: OnDevice) -> None:
        """After what the sender had under way."""
        stream = self._on.stream
        if buffer.ready is not None:
            stream.wait_event(buffer.ready)
        pointer, kind = buffer.tensor.data_ptr(), self._nccl.NCCL_UINT8
        self._communicator.send(pointer, buffer.nbytes, kind, RECEIVER, stream.cuda_stream)
        stream.synchronize()

    def receive(self, nbytes: int) -> OnDevice:
        """Into fresh memory."""
        tensor, stream = self._on.empty(nbytes), self._on.stream
        kind = self._nccl.NCCL_UINT8
        self._communicator.recv(tensor.data_ptr(), nbytes, kind, SENDER, stream.cuda_stream)
        stream.synchronize()
        return OnDevice(tensor)

    def abort(self) -> None:
        """Free it, too."""
        with contextlib.suppress(self._nccl.NcclError):
            self._communicator.abort()


class TorchLibrary:
    """torch's ProcessGroupNCCL, of two."""

    def join(self, notes: Notes, rank: int, device: Device) -> "TorchCommunicator":
        """torch exchanges the unique id by a store, which the notes are."""
        distributed = importlib.import_module("torch.distributed")
        options = distributed.ProcessGroupNCCL.Options()
        streamed = Streamed(device)
        group = distributed.ProcessGroupNCCL(store(notes), rank, 2, options)
        return TorchCommunicator(group, streamed)


class TorchCommunicator:
    """See `Communicator`."""

    def __init__(self, group: Any, streamed: Streamed) -> None:
        self._group = group
        self._on = streamed

    def send(self, buffer: OnDevice) -> None:
        """After what the sender had under way."""
        stream = self._on.stream
        if buffer.ready is not None:
            stream.wait_event(buffer.ready)
        with self._on.torch.cuda.stream(stream):
            self._group.send([buffer.tensor], RECEIVER, 0).wait()
        stream.synchronize()

    def receive(self, nbytes: int) -> OnDevice:
        """Into fresh memory."""
        tensor, stream = self._on.empty(nbytes), self._on.stream
        with self._on.torch.cuda.stream(stream):
            self._group.recv([tensor], SENDER, 0).wait()
        stream.synchronize()
        return OnDevice(tensor)

    def abort(self) -> None:
        """End the group."""
        self._group.abort()

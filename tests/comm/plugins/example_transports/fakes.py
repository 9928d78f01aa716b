"""The device transports with a fake device: "cpu" tensors take the place of those on a GPU.

All of ours is the real code; only what talks to CUDA and NCCL is replaced.
"""

import itertools
import mmap
import os
from pathlib import Path

import numpy as np

from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.transports.cuda_ipc import CudaIpcTransport
from rlinf.comm.transports.nccl import NcclTransport


def tensor_of(array):
    """torch is imported where a tensor comes, and not by every process that has this transport."""
    import torch

    return torch.from_numpy(array)


class OnCpu:
    """Usable where it is preferred, for tensors in host memory."""

    kinds = frozenset({"cpu"})

    @classmethod
    def missing(cls):
        return None

    @classmethod
    def unsuited(cls, device, config):
        return None if cls.name in config.backend_priority else "not asked for"


class FakeNccl:
    """Elements go as notes over the connection."""

    def join(self, notes, rank, device):
        notes.set(f"here {rank}", b"")
        notes.get(f"here {1 - rank}")
        return FakeCommunicator(notes)


class FakeCommunicator:
    def __init__(self, notes):
        self._notes = notes
        self._numbers = itertools.count()

    def send(self, buffer):
        self._notes.send(f"data {next(self._numbers)}", buffer.tensor.numpy().tobytes())

    def receive(self, nbytes):
        data = bytearray(self._notes.get(f"data {next(self._numbers)}", forget=True))
        assert len(data) == nbytes
        return OnDevice(tensor_of(np.frombuffer(data, np.uint8)))

    def abort(self):
        self._notes.close()


class FakeNcclTransport(OnCpu, NcclTransport):
    name = "fake_nccl"
    scheme = "fake-nccl"

    def library(self):
        return FakeNccl()


class FakeCuda:
    """Device memory is a memfd; its handle says of which process and which descriptor."""

    exported = 0
    opened = 0
    exports = 0

    def export(self, nbytes):
        return FakeExport(nbytes)

    def open(self, memory, event):
        return FakeImport(memory)


class FakeExport:
    def __init__(self, nbytes):
        self._fd = os.memfd_create("fake-device")
        os.ftruncate(self._fd, nbytes)
        self._memory = mmap.mmap(self._fd, nbytes)
        self.memory = f"/proc/{os.getpid()}/fd/{self._fd}".encode().ljust(64, b"\0")
        self.event = bytes(64)
        self._pending = None
        FakeCuda.exported += 1
        FakeCuda.exports += 1

    def write(self, buffer):
        assert self._pending is None, "written again before it was waited for"
        self._memory[: buffer.nbytes] = buffer.tensor.numpy().tobytes()
        self._pending = buffer

    def written(self):
        self._pending = None

    def free(self):
        self._memory.close()
        os.close(self._fd)
        FakeCuda.exported -= 1


class FakeImport:
    def __init__(self, memory):
        with Path(memory.rstrip(b"\0").decode()).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        FakeCuda.opened += 1

    def read(self, nbytes):
        return OnDevice(tensor_of(np.frombuffer(self._memory, np.uint8, nbytes).copy()))

    def close(self):
        self._memory.close()
        FakeCuda.opened -= 1


class FakeCudaIpcTransport(OnCpu, CudaIpcTransport):
    name = "fake_cuda_ipc"
    scheme = "fake-cuda-ipc"

    def cuda(self):
        return FakeCuda()

"""gloo: torch's ProcessGroupGloo beside a TCP connection, made for a pair when it is first needed.

No init_process_group, no rank, no port to agree on: the two ends meet through notes over their own
connection. It is slower than tcp here (see the README) and so comes last; it is for networks that
gloo has a better device for, and for programs that want torch's own path.
"""

import ctypes
import datetime
import importlib
import importlib.util
import itertools
from typing import Any, Final

import numpy as np

from rlinf.comm.config import CommConfig
from rlinf.comm.device import Device
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.transports.base import Surroundings, Transport
from rlinf.comm.transports.carrier import Buffer, Carrier, Notes
from rlinf.comm.transports.carrying import CarryingTransport
from rlinf.comm.transports.tcp import TcpTransport

PATIENCE_S: Final = 600.0
SENDER, RECEIVER = 0, 1


class GlooCarrier:
    """See the module.

    Args:
        notes: To meet by.
        sending: Which end this is.
        host: Address of this host, which the other end connects to.
    """

    def __init__(self, notes: Notes, sending: bool, host: str) -> None:
        self._torch = importlib.import_module("torch")
        self._group = process_group(notes, (SENDER if sending else RECEIVER, 2), host)
        self._tags = itertools.count()

    def offer(self, buffer: Buffer) -> bytes:
        """Nothing to prepare."""
        return b""

    def send(self, buffer: Buffer) -> None:
        """Send one."""
        tensor = self._torch.frombuffer(_at_address(buffer), dtype=self._torch.uint8)
        self._group.send([tensor], RECEIVER, self._tag()).wait()

    def receive(self, nbytes: int, place: bytes) -> memoryview:
        """Receive one into fresh memory."""
        memory = np.empty(nbytes, np.uint8)
        self._group.recv([self._torch.from_numpy(memory)], SENDER, self._tag()).wait()
        return memory.data

    def close(self) -> None:
        """Drop the group; its sockets close when nobody uses it any more."""
        self._group = None

    def _tag(self) -> int:
        return next(self._tags) & 0x3FFFFFFF


class GlooTransport(CarryingTransport):
    """Buffers over `CommConfig.inline_bytes` by gloo, the rest by TCP."""

    name = "gloo"
    scheme = "gloo"
    inner: type[Transport] = TcpTransport

    def __init__(self, surroundings: Surroundings) -> None:
        importlib.import_module("torch.distributed")  # seconds, which no message is to wait for
        super().__init__(surroundings)

    @classmethod
    def missing(cls) -> str | None:
        """Needs torch."""
        return None if importlib.util.find_spec("torch") else "torch is not installed"

    @classmethod
    def unsuited(cls, device: Device, config: CommConfig) -> str | None:
        """Only where it is asked for: tcp is always there, and faster."""
        return encryption(config) or (
            None if cls.name in config.backend_priority else "backend_priority does not ask for it"
        )

    def carries(self, buffer: Buffer) -> bool:
        """Large ones, in host memory."""
        is_large: bool = buffer.nbytes > self.surroundings.config.inline_bytes
        return is_large and type(buffer) is not OnDevice

    def make(self, notes: Notes, sending: bool) -> Carrier:
        """Meet the other end."""
        return GlooCarrier(notes, sending, self.surroundings.config.host or "127.0.0.1")


def encryption(config: CommConfig) -> str | None:
    """Why what does not encrypt is not to be used."""
    return "it does not encrypt, and tls_ca asks for that" if config.tls_ca else None


def process_group(notes: Notes, place: tuple[int, int], host: str) -> Any:
    """A ProcessGroupGloo whose members (rank, size) meet by notes."""
    distributed = importlib.import_module("torch.distributed")
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = datetime.timedelta(seconds=PATIENCE_S)
    return gloo(store(notes), *place, options)


def store(notes: Notes) -> Any:
    """Notes as a torch.distributed Store."""
    distributed = importlib.import_module("torch.distributed")

    class NotesStore(distributed.Store):  # type: ignore[misc,name-defined]
        """What process groups ask of a store to find each other."""

        def set(self, key: str, value: bytes) -> None:
            notes.set(key, bytes(value))

        def get(self, key: str) -> bytes:
            return notes.get(key)

        def wait(self, keys: list[str], timeout: object = None) -> None:
            for key in keys:
                notes.get(key)

        def set_timeout(self, timeout: datetime.timedelta) -> None:
            """Notes have their own."""

    return NotesStore()


def _at_address(buffer: memoryview) -> Any:
    """The buffer as one that torch takes without a word: it warns of read-only ones."""
    address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    array: Any = (ctypes.c_char * buffer.nbytes).from_address(address)
    array.keep = buffer
    return array

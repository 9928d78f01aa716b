"""Which device a worker computes on, and how near two workers are to each other. No I/O."""

import enum
import re
from dataclasses import dataclass
from typing import Protocol

_KIND = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One device as its own process numbers it: `cpu`, `cuda:1`, `npu:0`.

    Args:
        kind: The vendor's name in torch's words: cpu, cuda, rocm, xpu, npu, musa, ...
        index: Number of the device within the kind; 0 for cpu.
        uuid: The vendor's identity of the physical device, if known. Two processes that see
            different subsets number the same device differently; only the uuid tells.

    Raises:
        ValueError: The kind or index is not of that form.
    """

    kind: str = "cpu"
    index: int = 0
    uuid: str | None = None

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ValueError(f"device kind {self.kind!r} must be a lower-case word, as in 'cuda'")
        if type(self.index) is not int or self.index < 0:
            raise ValueError(f"device index {self.index!r} of {self.kind} must be an int >= 0")

    def __str__(self) -> str:
        return "cpu" if self.is_host else f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: "str | Device") -> "Device":
        """Read `cpu` or `kind:index`; a Device is returned as it is.

        Raises:
            ValueError: The text is not of that form.
        """
        if isinstance(text, Device):
            return text
        kind, colon, index = text.partition(":")
        if colon and not (index.isascii() and index.isdigit()):
            raise ValueError(f"device {text!r} must be 'kind:index', as in 'cuda:0'")
        return cls(kind, int(index) if colon else 0)

    @property
    def is_host(self) -> bool:
        """Whether its memory is host memory."""
        return self.kind == "cpu"

    def is_same(self, other: "Device") -> bool:
        """Whether both are the same physical device, seen from the same host."""
        if self.kind != other.kind:
            return False
        if self.uuid is not None and other.uuid is not None:
            return self.uuid == other.uuid
        return self.is_host or self.index == other.index


class Locality(enum.Enum):
    """How near two workers are; the nearest that holds."""

    SAME_PROCESS = "same process"
    SAME_DEVICE = "same device"
    SAME_HOST = "same host"
    REMOTE = "different hosts"


class Located(Protocol):
    """What `locality` looks at; a WorkerRecord is one."""

    @property
    def host(self) -> str:
        """Identity of the host: equal only where memory can be shared."""

    @property
    def pid(self) -> int:
        """Process id on that host."""

    @property
    def device(self) -> Device:
        """The device the worker's tensors are on."""


def locality(a: Located, b: Located) -> Locality:
    """How near `a` and `b` are. Symmetric. Workers on the host's memory share no device."""
    if a.host != b.host:
        return Locality.REMOTE
    if a.pid == b.pid:
        return Locality.SAME_PROCESS
    if not a.device.is_host and a.device.is_same(b.device):
        return Locality.SAME_DEVICE
    return Locality.SAME_HOST

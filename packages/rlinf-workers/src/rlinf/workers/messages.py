"""What a controller and its workers say to each other: frozen data.

The controller serves "controller" and takes `Hello`. Each worker process serves "worker" and takes
the others: `Call`, `Move` and `Leave` are queued for the main thread and answered when they are
done; `Probe`, `Abort` and `Shutdown` are answered at once, whatever the main thread is doing.
"""

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.channel import ChannelRef
from rlinf.comm import WorkerId
from rlinf.workers.base import Place
from rlinf.workers.errors import StartError

__all__ = [
    "CONTROLLER",
    "SERVICE",
    "Abort",
    "Call",
    "Flow",
    "Hello",
    "Leave",
    "Move",
    "Probe",
    "Pulse",
    "Shutdown",
]

CONTROLLER = WorkerId("controller", 0)
SERVICE = "worker"


@dataclass(frozen=True, slots=True)
class Hello:
    """This incarnation of a worker is constructed, or could not be (`fault`)."""

    worker: str
    incarnation: int
    pid: int
    fault: StartError | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Makes a call a stage call: the channels it runs between, and its place in the job.

    Attributes:
        ring: The channels of the ring that it belongs to, if any. Its head is the stage whose input
            is none of them.
    """

    input: ChannelRef
    output: ChannelRef | None
    iteration: int
    ring: tuple[ChannelRef, ...] = ()

    @property
    def heads(self) -> bool:
        """Whether this stage is the head of a ring."""
        return bool(self.ring) and self.input not in self.ring


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method; `number` is unique in the job."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    flow: Flow | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Compute there from now on; `number` counts with those of the calls.

    `world_size`: how many workers the group has now; None: as many as before.
    """

    number: int
    place: Place
    world_size: int | None = None
    method: str = "move"


@dataclass(frozen=True, slots=True)
class Leave:
    """Say that all calls which came before are done; `Shutdown` follows."""

    number: int
    method: str = "leave"


@dataclass(frozen=True, slots=True)
class Probe:
    """Say that you live; the answer is a `Pulse`."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life.

    Attributes:
        devices: What the worker computes on.
        rss_bytes: Resident memory of its process; 0: not known on this system.
        cpu_s: Processor time that its process has used.
    """

    devices: tuple[str, ...]
    rss_bytes: int
    cpu_s: float

    @classmethod
    def now(cls, devices: tuple[str, ...] = ()) -> "Pulse":
        """That of this process."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            pages = 0
        return cls(devices, pages * resource.getpagesize(), time.process_time())


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up the call as soon as possible: it fails with `Aborted`."""

    number: int
    because: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Give up what you are doing and end."""

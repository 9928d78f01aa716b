"""What a worker is where it runs: its place in the job, and the hooks the framework calls."""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from rlinf.comm import Endpoint, WorkerId
from rlinf.sched import Placement

__all__ = ["Context", "Place", "WorkerBase"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank computes.

    Attributes:
        placement: What the plan says about the group; None where no plan does.
        devices: Devices of this rank, a part of the placement's.
        chunk: Items its stages take at a time; None: everything until the input is closed.
        eager: They take what is there, up to a chunk, rather than wait until there is a whole one;
            a chunk may become larger than that where it takes less than 50 ms.
    """

    placement: Placement | None = None
    devices: tuple[str, ...] = ()
    chunk: int | None = 8
    eager: bool = True

    @property
    def cores(self) -> tuple[int, ...]:
        """Indexes of its CPU cores among those the launching process may use."""
        names = (device.rpartition("/")[2].partition(":") for device in self.devices)
        return tuple(int(index) for kind, _, index in names if kind == "core")

    @property
    def threads(self) -> int:
        """Threads to compute with: its cores, at least one."""
        return max(1, len(self.cores))

    @property
    def shared(self) -> bool:
        """Others use its devices too, so it must hold their lock while it computes."""
        return self.placement is not None and self.placement.shared and bool(self.devices)


@dataclass(frozen=True, slots=True)
class Context:
    """How this instance came to be where it is.

    Attributes:
        place: Where it computes; the framework replaces the context when the group moves.
        incarnation: 0 for the first start, one more after each restart.
        late: It joined a group that was running.
    """

    place: Place = Place()
    incarnation: int = 0
    late: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of this rank."""
        return self.place.devices


class WorkerBase:
    """What a worker has and may override; `Worker` adds how a group of it is made."""

    restarts: ClassVar[int | None] = None
    """How often a dead worker is restarted with no call done in between. 0: its death stops the
    job. None: the cluster decides. One that holds state (a stage has a `finish`, or there is a
    method `restore`) comes back without it: see `StateLost`."""
    host_only: ClassVar[bool] = False
    """It needs no device of a plan (scoring by rule, calling tools): it works beside the others, on
    what is there, and plans leave it out."""

    endpoint: Endpoint
    id: WorkerId
    rank: int
    world_size: int
    context: Context

    # -- hooks, run on the worker's main thread ---------------------------------------------------

    def onload(self) -> None:
        """Bring the state onto this rank's devices, which are held from now on."""

    def offload(self) -> None:
        """Free this rank's devices: another group computes on them next. Loses no state."""

    def resident_bytes(self) -> int:
        """Memory this worker occupies on its devices just now."""
        return 0

    def idle_s(self) -> float:
        """Seconds of all its work so far in which it waited for others, such as tools."""
        return 0.0

    def cpu_s(self) -> float:
        """Processor seconds spent so far, those of processes that work for it included."""
        return time.process_time()

    def recovered(self) -> None:
        """Called in a worker that is restarted or joins late, before any call.

        Its constructor has run. The place to fetch from others what one that was there would have,
        such as current weights. The others may be busy in a stage: ask a service of theirs
        (`self.endpoint.call`), which their dispatching thread answers. If it raises, the start has
        failed.
        """

    def close(self) -> None:
        """Called when the worker is shut down in good order; not when it is killed."""

    def count_tokens(self, item: Any) -> int:
        """Tokens that an item stands for in the records: its `token_count`, or 0."""
        return int(getattr(item, "token_count", 0))

"""Worker: a class of which a group runs several instances; `@stage` marks its chunk functions.

    class Scorer(Worker):
        def __init__(self, bonus: float) -> None:
            self.bonus = bonus

        @stage
        def score(self, samples: list[Sample]) -> list[float]:
            return [sample.reward + self.bonus for sample in samples]

The constructor runs where the worker runs, and `self.endpoint`, `self.id`, `self.rank`,
`self.world_size` and `self.context` are there already. Every public method can be called through
the group, on every rank; calls are carried out one after another on the worker's main thread.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, overload

from rlinf.comm import Endpoint, WorkerId

if TYPE_CHECKING:
    from rlinf.sched import Placement
    from rlinf.workers.cluster import Cluster
    from rlinf.workers.group import Group

__all__ = ["Context", "Stage", "Worker", "public_methods", "stage", "stages"]

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__rlinf_stage__"


@dataclass(frozen=True, slots=True)
class Stage:
    """What `@stage` notes on a function.

    Attributes:
        finish: Name of the method to run after the last chunk, under the same devices.
        streaming: The function yields (index of the input, output) as outputs get ready.
    """

    finish: str = ""
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """How this instance came to be where it is.

    Attributes:
        placement: What the plan says about the group; None where it was launched without one.
        devices: Devices of this rank, a part of the placement's.
        incarnation: 0 for the first start, one more after each restart.
        threads: Threads this rank should compute with: its cores, at least one.
    """

    placement: "Placement | None" = None
    devices: tuple[str, ...] = ()
    incarnation: int = 0
    threads: int = 1

    @property
    def cores(self) -> tuple[int, ...]:
        """Indexes of this rank's CPU cores among those the launching process may use."""
        names = (device.rpartition("/")[2].partition(":") for device in self.devices)
        return tuple(int(index) for kind, _, index in names if kind == "core")


class Worker:
    """Base of all workers. Subclasses define their own constructor and need not call this one."""

    restarts: ClassVar[int | None] = None
    """How often a dead worker is restarted with no call done in between. 0: its state cannot be
    rebuilt, its death stops the job. None: the cluster decides; 0 where a stage has a `finish`."""

    endpoint: Endpoint
    id: WorkerId
    rank: int
    world_size: int
    context: Context

    @classmethod
    def group(
        cls,
        cluster: "Cluster",
        *args: object,
        count: int = 1,
        name: str | None = None,
        restarts: int | None = None,
        **kwargs: object,
    ) -> "Group[Self]":
        """Describe `count` workers of this class; `.launch(placement)` starts them.

        Args:
            cluster: Where they run.
            args: For the constructor of every rank, with `kwargs`; sent encoded.
            count: Number of ranks, 0 to count - 1.
            name: Name of the group, unique in the cluster; the lower-case class name by default.
            restarts: Overrides `Worker.restarts`.
            kwargs: For the constructor.
        """
        from rlinf.workers.group import Group

        return Group(cluster, cls, args, kwargs).named(name, count, restarts)

    # -- hooks, run on the worker's main thread ---------------------------------------------------

    def onload(self) -> None:
        """Bring the state onto this rank's devices, which are held from now on."""

    def offload(self) -> None:
        """Free this rank's devices: another group computes on them next. Loses no state."""

    def resident_bytes(self) -> int:
        """Memory this worker occupies on its devices just now."""
        return 0

    def recovered(self) -> None:
        """Called instead of nothing in a restarted worker, after its constructor, before any call.

        The place to fetch from others what the dead incarnation had, such as current weights. The
        others may be busy in a stage: ask a service of theirs (`self.endpoint.call`), which their
        dispatching thread answers. If it raises, the restart has failed.
        """

    def close(self) -> None:
        """Called when the worker is shut down in good order; not when it is killed."""

    def count_tokens(self, item: Any) -> int:
        """Tokens an item stands for in the records: its `tokens` (a number or a sequence), or 0."""
        tokens = getattr(item, "tokens", 0)
        return int(tokens) if isinstance(tokens, int | float) else len(tokens)


@overload
def stage(function: F) -> F: ...
@overload
def stage(*, finish: str = "") -> Callable[[F], F]: ...
def stage(function: F | None = None, *, finish: str = "") -> F | Callable[[F], F]:
    """Mark a method as a stage: called through the group it takes channels in place of items.

    The method takes a list of items as its first argument, and
    - returns a list with one output an item, in the same order; or
    - returns `(outputs, weights)`, two lists of equal length, however many; or
    - is a generator of `(index of the item, output)` or `(index, output, weight)` in the order of
      completion; each output is passed on at once, and each index must come exactly once.
    Without an output channel it may return anything; its values come back in the `StageReport`.

    Called through the group with `(input, output, *args, **kwargs)`, the framework loops: take a
    chunk as large as the plan says, hold the devices if they are shared, call, commit the outputs
    and acknowledge the chunk in one step, until the input is closed and empty.

    Args:
        function: The method.
        finish: Name of a method without arguments to call after the last chunk. The stage is then
            taken to gather state over its chunks, which a restart cannot bring back.
    """
    if function is None:
        return lambda real: _mark(real, finish)
    return _mark(function, finish)


def _mark(function: F, finish: str) -> F:
    streaming = inspect.isgeneratorfunction(function)
    setattr(function, MARK, Stage(finish=finish, streaming=streaming))
    return function


def stages(cls: type[Worker]) -> dict[str, Stage]:
    """The stages of a worker class, by method name; `finish` methods are checked to exist."""
    found = {}
    for name, function in _functions(cls):
        mark: Stage | None = getattr(function, MARK, None)
        if mark is None:
            continue
        if mark.finish and not callable(getattr(cls, mark.finish, None)):
            raise TypeError(
                f"{cls.__name__}.{name} names {mark.finish!r} to finish: no such method"
            )
        found[name] = mark
    return found


def public_methods(cls: type[Worker]) -> tuple[str, ...]:
    """Methods which a group can call: public, and none of the class methods of `Worker`."""
    return tuple(sorted(name for name, _ in _functions(cls)))


def _functions(cls: type[Worker]) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function

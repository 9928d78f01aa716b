"""Groups: N workers of one class, called as one.

    group = Scorer.group(cluster, bonus=1.0, count=2).launch(plan.placements()["scorer"])
    handle = group.score(samples, scored)      # a stage, between two channels
    group.save("/tmp/x").result()              # any other method, on every rank

A call returns at once with a Handle of the list of results, one a rank. Calls made before the
workers have started wait for them.
"""

import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rlinf.channel import Channel, ChannelRef
from rlinf.comm import DEFAULT, Handle
from rlinf.comm.handle import TimeoutLike, awaiting
from rlinf.sched import Placement, Plan
from rlinf.workers.base import Context, Place, WorkerBase
from rlinf.workers.cluster import Cluster, Ring
from rlinf.workers.devices import rank_places
from rlinf.workers.errors import Aborted, ConfigError, MethodUnknown
from rlinf.workers.messages import Call, Flow, Move
from rlinf.workers.process import WorkerProgram
from rlinf.workers.stages import holds_state, public_methods, stages

__all__ = ["Group", "Method", "WorkerGroup", "wait_all"]

W = TypeVar("W", bound=WorkerBase)


class Group(Generic[W]):
    """A group that is described but not started; made by `Worker.group`."""

    def __init__(
        self, cluster: Cluster, cls: type[W], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self._cluster, self._cls = cluster, cls
        self._args, self._kwargs = tuple(args), dict(kwargs)
        self.named(None, 1, None)

    def named(self, name: str | None, count: int, restarts: int | None) -> "Group[W]":
        """Set what `Worker.group` takes beside the constructor's arguments."""
        self._name = name or self._cls.__name__.lower()
        self._count = count
        chosen = self._cls.restarts if restarts is None else restarts
        self._restarts = self._cluster.config.restarts if chosen is None else chosen
        return self

    def launch(self, place: Placement | Plan | None = None) -> "WorkerGroup":
        """Start the workers and return at once; see `WorkerGroup.wait_ready`.

        Args:
            place: Where: the group's placement, or a plan that has a component of its name. None:
                where the cluster's planner says, if there is one; until then anywhere, with one
                thread a worker, on what items there are and without a device lock.

        Raises:
            InfeasiblePlacement: The cluster does not have the devices, or ranks cannot share them.
        """
        places = self._places(place)
        ranks = tuple(range(self._count))
        group = WorkerGroup(self._cluster, self._cls, self._name, ranks, places)
        group.join = partial(self._join, places)
        group.managed = place is None and not self._cls.host_only
        self._cluster.claim(group)
        for rank in ranks:
            self._join(places, rank)
        return group

    def _places(self, place: Placement | Plan | None) -> list[Place]:
        if place is None:
            return [Place()] * self._count
        if isinstance(place, Placement):
            return rank_places(self._name, self._count, place, self._cluster.devices)
        placements = place.placements()
        if self._name not in placements:
            known = ", ".join(placements)
            raise KeyError(f"the plan has no component {self._name!r}; it has {known}")
        placement = placements[self._name]
        return rank_places(self._name, self._count, placement, self._cluster.devices, place.batch)

    def _join(self, places: Sequence[Place], rank: int, late: bool = False) -> None:
        """Start a rank; `places` are those of the group at any time."""
        id = f"{self._name}/{rank}"

        def program(incarnation: int) -> WorkerProgram:
            # One that dies while it leaves has no place any more, but work to finish.
            place = places[rank] if rank < len(places) else Place()
            return WorkerProgram(
                id=id,
                cls=self._cls,
                args=self._args,
                kwargs=self._kwargs,
                world_size=len(places),
                context=Context(place, incarnation, late),
                comm=self._cluster.comm,
            )

        unit = self._name if holds_state(self._cls) else ""
        self._cluster.controller.join(id, self._restarts, program, unit)


class WorkerGroup:
    """Started workers. Attribute access gives their methods; see the module."""

    def __init__(
        self,
        cluster: Cluster,
        cls: type[WorkerBase],
        name: str,
        ranks: tuple[int, ...],
        places: list[Place],
    ) -> None:
        self._cluster, self._cls, self._ranks = cluster, cls, ranks
        self._places = places
        self._methods = public_methods(cls)
        self._stages = stages(cls)
        self._calls = 0
        self._batch: int | None = None
        self.name = name
        self.managed = False
        self.join: Callable[[int, bool], None] | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """The workers' names, in order of rank."""
        return tuple(f"{self.name}/{rank}" for rank in self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: int | slice) -> "WorkerGroup":
        """The group reduced to one rank, or to several."""
        ranks = self._ranks[rank] if isinstance(rank, slice) else (self._ranks[rank],)
        return WorkerGroup(self._cluster, self._cls, self.name, ranks, self._places)

    def __getattr__(self, name: str) -> "Method":
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._methods:
            near = difflib.get_close_matches(name, self._methods, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self._methods)}"
            kind = self._cls.__name__
            raise MethodUnknown(f"{kind} (group {self.name}) has no public method {name!r}; {hint}")
        return Method(self, name)

    def move(self, placement: Placement, batch: int | None = None) -> Handle[list[Any]]:
        """Compute there from now on: devices, chunks and lock change, state and program do not.

        Takes its turn among the calls of each worker; a worker that is restarted starts there.

        Args:
            placement: Of the whole group.
            batch: Items of an iteration; several ranks that take a whole one take equal parts.

        Raises:
            InfeasiblePlacement: The cluster does not have the devices, or ranks cannot share them.
        """
        places = rank_places(self.name, len(self._places), placement, self._cluster.devices, batch)
        self._batch = batch
        for rank in self._ranks:
            self._places[rank] = places[rank]
        return gather(self._moved(), f"moving {self.name}")

    def resize(self, count: int, placement: Placement | None = None) -> Handle[list[Any]]:
        """Have so many workers from the next call on, on these devices; None: on those it has.

        Those that join are constructed as the first ones were, and `recovered`, which is where they
        fetch current weights. Those that leave, the last ones, do first what they were asked
        before. The handle is done when all of that is.

        Raises:
            ConfigError: It holds state, which has to come from a checkpoint at another size; or
                this is a part of a group.
            InfeasiblePlacement: The ranks cannot share the devices.
        """
        if count < 1:
            raise ConfigError(f"group {self.name} cannot have {count} workers: at least one stays")
        if self.join is None or holds_state(self._cls):
            why = "holds state" if self.join is not None else "is a part of one"
            raise ConfigError(
                f"group {self.name} {why}: its size is fixed while it runs; end the run and resume "
                "it at another size"
            )
        before, placement = len(self._ranks), placement or self._places[0].placement
        devices = self._cluster.devices
        if placement is None:
            self._places[:] = [self._places[0]] * count
        else:
            self._places[:] = rank_places(self.name, count, placement, devices, self._batch)
        controller, leaving = self._cluster.controller, self.ids[count:]
        self._ranks = tuple(range(count))
        handles = [controller.leave(id) for id in leaving]
        handles += self[:before]._moved()
        for rank in range(before, count):
            self.join(rank, True)
            handles.append(controller.started(f"{self.name}/{rank}"))
        return gather(handles, f"resizing {self.name} to {count}")

    def _moved(self) -> list[Handle[Any]]:
        """Tell each rank of its place, and of how many there are."""
        controller = self._cluster.controller
        handles = []
        for rank, id in zip(self._ranks, self.ids, strict=True):
            move = Move(controller.number(), self._places[rank], len(self._places))
            handles.append(controller.submit(id, move, f"moving {id}"))
        return handles

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every worker is constructed.

        Raises:
            StartError: A constructor raised, or a process could not be started.
            rlinf.comm.Timeout: Not within `timeout` seconds.
        """
        controller = self._cluster.controller
        gather([controller.started(id) for id in self.ids], f"start of {self.name}").result(timeout)

    def call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Handle[list[Any]]:
        """What `group.method(*args, **kwargs)` does."""
        flow, rest = None, list(args)
        if method in self._stages and args and isinstance(args[0], Channel | ChannelRef):
            flow, rest = self._flow(list(args))
        plain = tuple(map(_reference, rest))
        named = {key: _reference(value) for key, value in kwargs.items()}
        controller = self._cluster.controller
        calls = [Call(controller.number(), method, plain, named, flow) for _ in self._ranks]
        what = f"{self.name}.{method}"
        if flow is not None:
            self._cluster.iterations.begins(flow, [call.number for call in calls])
        handles = [
            controller.submit(id, call, f"{id}.{method}")
            for id, call in zip(self.ids, calls, strict=True)
        ]
        if flow is None:
            return gather(handles, what)
        numbers = [call.number for call in calls]
        return gather(handles, what, lambda out: self._cluster.stage_ended(flow, numbers, out))

    def _flow(self, args: list[Any]) -> tuple[Flow, list[Any]]:
        source, rest = _reference(args[0]), args[1:]
        target = None
        if rest and isinstance(rest[0], Channel | ChannelRef):
            target, rest = _reference(rest[0]), rest[1:]
        self._calls += 1
        iteration = self._cluster.iterations.of(source.name, self._calls)
        ring = self._cluster.iterations.ring_of(source.name)
        if rest and isinstance(rest[0], Ring):
            ring, rest = tuple(map(_reference, rest[0])), rest[1:]
            if target is None or len(self) > 1:
                raise ConfigError(
                    f"{self.name} heads a ring with {len(self)} worker(s): it needs an output "
                    "channel for what leaves, and one worker, to which everything comes back"
                )
        return Flow(source, target, iteration, ring), rest


class Method:
    """A method of a group, ready to be called."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group, self._name = group, name

    def __repr__(self) -> str:
        return f"<{self._group.name}.{self._name} on {len(self._group)} worker(s)>"

    def __call__(self, *args: Any, **kwargs: Any) -> Handle[list[Any]]:
        """Call it on every rank. Channels among the arguments arrive as `ChannelRef`.

        A stage called with channels, `(input, output, ...)` or `(input, ...)`, or as the head of a
        ring with `(input, output, ring, ...)`, gives a list of
        `StageReport`; once every rank is done the output channel is closed.
        """
        return self._group.call(self._name, args, kwargs)


Ending = Callable[[list[Any] | BaseException], Handle[None] | None]


def gather(
    handles: Sequence[Handle[Any]], what: str, ending: Ending | None = None
) -> Handle[list[Any]]:
    """One handle for several: the list of their results, or the first error.

    `ending` is called once with that list or error; the list waits for the handle it returns.
    """
    gathered: Handle[list[Any]] = awaiting(handles, what, timeout_s=None)
    left = len(handles)
    lock = threading.Lock()

    def succeed() -> None:
        results = [handle.result(0) for handle in handles]
        after = ending(results) if ending is not None else None
        if after is None:
            gathered.set_result(results)
        else:
            after.add_done_callback(lambda done: _pass_on(done, gathered, results))

    def one_done(handle: Handle[Any]) -> None:
        nonlocal left
        error = handle.exception()
        with lock:
            left -= 1
            last = left == 0
        if error is not None:
            if gathered.set_error(error) and ending is not None:
                ending(error)
        elif last and not gathered.done():
            succeed()

    for handle in handles:
        handle.add_done_callback(one_done)
    if not handles:
        succeed()
    return gathered


def _pass_on(done: Handle[None], gathered: Handle[list[Any]], results: list[Any]) -> None:
    error = done.exception()
    if error is None:
        gathered.set_result(results)
    else:
        gathered.set_error(error)


def wait_all(handles: Sequence[Handle[Any]], timeout: TimeoutLike = DEFAULT) -> list[Any]:
    """Wait for all handles and return their results in order; the first error, in time, is raised.

    Without a timeout it waits for as long as the workers live: the death or silence of any of them
    completes its handles. An `Aborted` call is a consequence of another's failure, which is raised.
    """
    limit = None if timeout is DEFAULT else timeout
    everything = gather(handles, ", ".join(handle.what for handle in handles))
    try:
        return everything.result(limit)
    except Aborted:
        for handle in handles:
            error = handle.exception()
            if error is not None and not isinstance(error, Aborted):
                raise error from None
        raise


def _reference(value: Any) -> Any:
    return value.ref if isinstance(value, Channel) else value

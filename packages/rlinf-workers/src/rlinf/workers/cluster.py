"""Cluster: the job. It owns the registry, the channel server, the controller and all processes.

with Cluster(launcher="inline") as cluster:
    scorer = Scorer.group(cluster).launch()
    samples, scored = cluster.channels(1, "samples", "scored")
"""

import atexit
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rlinf.channel import Channel, ChannelConfig, ChannelError, announce
from rlinf.channel.life import LIFE_SERVICE, Life
from rlinf.comm import CommConfig, CommError, Endpoint, Handle, Request
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.sched import Placement
from rlinf.workers.bounds import Natural, NonNegative, Positive
from rlinf.workers.chronicle import Chronicle
from rlinf.workers.controller import Controller
from rlinf.workers.devices import check_local, device_names, local_cores
from rlinf.workers.errors import ConfigError, WorkerError, is_consequence
from rlinf.workers.iterations import Iterations
from rlinf.workers.launch.base import Launcher
from rlinf.workers.launch.inline import InlineLauncher
from rlinf.workers.messages import CONTROLLER, Call, Flow
from rlinf.workers.records import RecordSink, StageReport
from rlinf.workers.server import CHANNELS, ServerProgram
from rlinf.workers.supervision import Limits, WorkerStatistics
from rlinf.workers.tracing import traced_communication, traced_stages

__all__ = ["Cluster", "ClusterConfig", "Movable", "Ring"]

log = logging.getLogger(__name__)


class Movable(Protocol):
    """A launched group, as far as whoever plans is concerned.

    Attributes:
        name: Its name.
        managed: It was launched without a placement and wants one.
    """

    name: str
    managed: bool

    def __len__(self) -> int:
        """Its number of ranks."""

    def move(self, placement: Placement, batch: int | None = None) -> Handle[list[Any]]:
        """Compute there from now on."""


class Ring(tuple[Channel, ...]):
    """Channels along which some stages feed one another, from the first stage back to it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where a job runs and how long it waits.

    Attributes:
        devices: Names of what it may use, such as core:0; all cores of this machine by default,
            and all devices of a Ray cluster that is joined.
        ray_address: Of a running Ray cluster to join; empty: start one here.
        restarts: How often a dead worker is restarted with no call done in between, where its
            class does not say.
        start_s: Deadline for a worker to be constructed.
        silence_s: A worker that answers no ping for so long counts as dead and is killed.
        heartbeat_s: How often workers are pinged.
        grace_s: At the end, workers have this long to come to theirs.
        show_output: Whether what workers print appears on the terminal (launcher ray).
    """

    devices: tuple[str, ...] = field(default_factory=local_cores)
    ray_address: str = ""
    restarts: Natural = 3
    start_s: Positive = 180.0
    silence_s: Positive = 30.0
    heartbeat_s: Positive = 2.0
    grace_s: NonNegative = 5.0
    show_output: bool = False

    def __post_init__(self) -> None:
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s is {self.silence_s} and heartbeat_s {self.heartbeat_s}: a worker needs "
                "the time of two heartbeats at least before its silence means something"
            )


class Cluster:
    """A context manager; `close` is called at the end of the program if nobody else did.

    Args:
        config: See `ClusterConfig`.
        launcher: "inline": threads of this process; "ray": a process a worker.
        devices: Instead of `config.devices`.
        comm: Settings of every endpoint of the job.
        folder: Where the program writes its run, for whoever looks at it.

    Raises:
        StartError: A Ray cluster to join does not answer. (One that is started here is started in
            the background; its error comes from the first call.)
        ConfigError: The launcher is not known.
    """

    def __init__(
        self,
        config: ClusterConfig | None = None,
        launcher: str = "ray",
        *,
        devices: tuple[str, ...] | None = None,
        comm: CommConfig | None = None,
        folder: Path | None = None,
    ) -> None:
        config = config or ClusterConfig()
        self.config = config if devices is None else replace(config, devices=devices)
        self.comm = comm
        self.folder = folder
        self._groups: dict[str, Movable] = {}
        self._lock = threading.Lock()
        self._chronicle = Chronicle()
        self._sinks: list[RecordSink] = [self._chronicle]
        self._closing = contextlib.ExitStack()
        atexit.register(self.close)
        try:
            self._open(launcher)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> None:
        """Each thing opened is closed in the reverse order, also if a later one fails."""
        config, close = self.config, self._closing
        close.enter_context(_terminable())
        if not config.ray_address:
            check_local(config.devices, local_cores())
        launcher = _launcher(name, config)
        close.callback(launcher.close)
        self.devices = config.devices
        if config.ray_address and name == "ray":
            self.devices = device_names(launcher.nodes())
        self.endpoint = Endpoint(CONTROLLER, registry=launcher.registry, config=self.comm)
        close.callback(self.endpoint.close)
        close.enter_context(traced_communication(self.endpoint))
        close.enter_context(traced_stages(self._sinks))
        limits = Limits(config.start_s, config.silence_s, config.heartbeat_s)
        self.controller = Controller(self.endpoint, launcher, limits, self._chronicle)
        self.endpoint.serve(LIFE_SERVICE, self._tell)
        close.callback(self.controller.close, config.grace_s)
        self.iterations = Iterations(self.endpoint, self.controller.abort)
        close.callback(self.iterations.close)
        self.controller.join(CHANNELS, 0, lambda _: ServerProgram(comm=self.comm))
        registry = launcher.registry
        close.enter_context(announce(registry.address, registry.token, server=CHANNELS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is not None and is_consequence(error):
            self._await_verdict()
        failure = self.controller.failure
        self.close()
        foreseen = isinstance(error, WorkerError | ChannelError | CommError)
        if failure is not None and foreseen and error is not failure:
            raise failure from error

    def _await_verdict(self) -> None:
        """Wait until it is known whether the channel server lives."""
        probe = Call(self.controller.number(), "probe")
        asked = self.controller.submit(CHANNELS, probe, f"a sign of life of {CHANNELS}")
        with contextlib.suppress(WorkerError, CommTimeout):
            asked.result(2 * self.config.silence_s)

    def close(self) -> None:
        """End every worker and process, and give everything back. May be called again."""
        atexit.unregister(self.close)
        self._closing.close()

    # -- channels ---------------------------------------------------------------------------------

    def channel(self, name: str, config: ChannelConfig | None = None) -> Channel:
        """Create a channel that lives until it is deleted or the cluster is closed."""
        [channel] = self._created([name], config)
        return channel

    def channels(
        self, step: int, *names: str, config: ChannelConfig | None = None
    ) -> tuple[Channel, ...]:
        """Create the channels of one iteration; `step` orders the stages that share devices.

        A channel is closed when every rank of the stage that writes to it is done, and deleted
        when every rank of the stage that reads from it is. Those of an iteration that failed are
        emptied; asking for the same step again gives new ones.
        """
        self.iterations.discard()
        fresh = self.iterations.fresh
        made = self._created([fresh(f"{name}.{step}") for name in names], config)
        self.iterations.add(step, made)
        return made

    def _created(self, names: Sequence[str], config: ChannelConfig | None) -> tuple[Channel, ...]:
        self.controller.started(CHANNELS).result()
        return Channel.create_all(names, self.endpoint, config, server=CHANNELS)

    def ring(self, step: int, *names: str, config: ChannelConfig | None = None) -> Ring:
        """Create channels that lead round, for stages of one iteration that feed one another.

            ring = cluster.ring(step, "observed", "acted")
            simulator.step(requests, trajectories, ring)    # the head
            policy.act(*ring)

        The head, one worker, takes what is new from its input, and from the last channel what comes
        back; what it wraps in `Again` goes into the first channel, all else leaves into its output.
        Each other stage goes from a channel to the next. Once the head's input is closed and
        everything has left, the first channel is closed, and the others come to their end.
        """
        ring = Ring(self.channels(step, *names, config=config))
        self.iterations.add_ring(tuple(channel.ref for channel in ring))
        return ring

    def give_up(self, step: int) -> None:
        """End the calls of an iteration whose outcome nobody wants, and empty its channels."""
        self.iterations.give_up(step)

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Every worker as it is now: incarnation, process, calls under way; the server first."""
        return self.controller.statistics()

    def note(self, kind: str, text: str, who: str = "") -> None:
        """Tell whoever looks at the job from outside that something happened just now.

        Args:
            kind: One word: "plan", "recovery".
            text: What happened.
            who: The worker that it is about.
        """
        self._chronicle.note(kind, who, text)

    def _tell(self, request: Request) -> None:
        """On the dispatching thread: what `rlinf-monitor` shows of the workers."""
        spans, incidents = self._chronicle.since(*request.payload)
        run = str(self.folder.absolute()) if self.folder is not None else ""
        request.reply(Life(time.time(), self.controller.lives(), spans, incidents, run))

    def add_sink(self, sink: RecordSink) -> None:
        """Give every chunk's record to `sink` when its stage call is done; it must not block."""
        self._sinks.append(sink)

    # -- for groups -------------------------------------------------------------------------------

    def claim(self, group: Movable) -> None:
        """Take in a group. Raises `ConfigError` where its name is taken."""
        with self._lock:
            if group.name in self._groups:
                raise ConfigError(
                    f"the cluster has a group {group.name!r} already: give another name"
                )
            self._groups[group.name] = group

    @property
    def groups(self) -> Mapping[str, Movable]:
        """The groups that were launched, by name, in that order."""
        with self._lock:
            return dict(self._groups)

    def stage_ended(
        self, flow: Flow, numbers: Sequence[int], outcome: Sequence[StageReport] | BaseException
    ) -> Handle[None] | None:
        """After a stage call: tell of its records, and settle its channels or its iteration."""
        if isinstance(outcome, BaseException):
            return self.iterations.ended(flow, numbers, outcome)
        for report in outcome:
            for record in report.records:
                for sink in self._sinks:
                    sink(record)
        return self.iterations.ended(flow, numbers, closed=all(r.closed for r in outcome))


def _launcher(name: str, config: ClusterConfig) -> Launcher:
    if name == "inline":
        return InlineLauncher()
    if name == "ray":
        from rlinf.workers.launch.ray import RayLauncher

        cores = sum(device.startswith("core:") for device in config.devices)
        return RayLauncher(config.ray_address, cores=cores, show_output=config.show_output)
    raise ConfigError(f"launcher={name} is not known: choose ray or inline")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the program the way `sys.exit` does, so that everything is given back."""
    replace_it = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not replace_it:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

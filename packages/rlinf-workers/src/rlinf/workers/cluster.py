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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

from rlinf.channel import Channel, ChannelBusy, ChannelClosed, ChannelConfig, ChannelError, announce
from rlinf.channel import Timeout as ChannelTimeout
from rlinf.comm import CommConfig, CommError, Endpoint, Handle
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.sched import Placement
from rlinf.workers.bounds import Natural, NonNegative, Positive
from rlinf.workers.controller import Controller
from rlinf.workers.devices import check_local, device_names, local_cores
from rlinf.workers.errors import ClusterClosed, ConfigError, WorkerError, is_consequence
from rlinf.workers.launch.base import Launcher
from rlinf.workers.launch.inline import InlineLauncher
from rlinf.workers.messages import CONTROLLER, Call, Flow
from rlinf.workers.records import RecordSink, StageReport
from rlinf.workers.server import CHANNELS, ServerProgram
from rlinf.workers.supervision import Limits, WorkerStatistics
from rlinf.workers.tracing import traced_communication, traced_stages

__all__ = ["Cluster", "ClusterConfig", "Movable"]

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
    ) -> None:
        config = config or ClusterConfig()
        self.config = config if devices is None else replace(config, devices=devices)
        self.comm = comm
        self._groups: dict[str, Movable] = {}
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._channels: dict[str, tuple[int, Channel]] = {}
        self._failed: dict[str, Channel] = {}
        self._running: dict[int, set[int]] = {}
        self._sinks: list[RecordSink] = []
        self._settlers = ThreadPoolExecutor(1, thread_name_prefix="rlinf-settle")
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
        self.controller = Controller(self.endpoint, launcher, limits)
        close.callback(self.controller.close, config.grace_s)
        close.callback(self._settlers.shutdown, cancel_futures=True)
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
        self.controller.started(CHANNELS).result()
        return Channel.create(name, self.endpoint, config, server=CHANNELS)

    def channels(
        self, step: int, *names: str, config: ChannelConfig | None = None
    ) -> tuple[Channel, ...]:
        """Create the channels of one iteration; `step` orders the stages that share devices.

        A channel is closed when every rank of the stage that writes to it is done, and deleted
        when every rank of the stage that reads from it is. Those of an iteration that failed are
        emptied; asking for the same step again gives new ones.
        """
        self._submit(self._discard)
        made = tuple(self.channel(self._fresh(f"{name}.{step}"), config) for name in names)
        with self._lock:
            self._channels.update((channel.ref.name, (step, channel)) for channel in made)
        return made

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Every worker as it is now: incarnation, process, calls under way; the server first."""
        return self.controller.statistics()

    def _fresh(self, name: str) -> str:
        with self._lock:
            self._tries[name] += 1
            return name if self._tries[name] == 1 else f"{name}.again{self._tries[name] - 1}"

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

    def iteration(self, channel: str, default: int) -> int:
        """The iteration that a channel belongs to."""
        with self._lock:
            found = self._channels.get(channel)
        return default if found is None else found[0]

    def stage_begins(self, flow: Flow, numbers: Sequence[int]) -> None:
        """Note that these calls belong to an iteration, which fails as a whole."""
        with self._lock:
            self._running.setdefault(flow.iteration, set()).update(numbers)

    def stage_ended(
        self, flow: Flow, numbers: Sequence[int], outcome: Sequence[StageReport] | BaseException
    ) -> Handle[None] | None:
        """After a stage call: close its output and forget its input, or give up its iteration."""
        step = flow.iteration
        with self._lock:
            running = self._running.pop(step, set()).difference(numbers)
            if running and not isinstance(outcome, BaseException):
                self._running[step] = running
        if isinstance(outcome, BaseException):
            with self._lock:
                self._failed |= {n: c for n, (at, c) in self._channels.items() if at == step}
            for number in (*numbers, *running):
                self.controller.abort(number, str(outcome))
            return None
        for report in outcome:
            for record in report.records:
                for sink in self._sinks:
                    sink(record)
        return self._background(self._settle, flow)

    def _settle(self, flow: Flow) -> None:
        """Close the output: those downstream come to their end. Then forget what was read."""
        if flow.output is not None:
            with self._lock:
                _, channel = self._channels.get(flow.output.name, (0, None))
            (channel or flow.output.open(self.endpoint)).close()
        self._submit(self._forget, flow)

    def _forget(self, flow: Flow) -> None:
        with self._lock:
            _, channel = self._channels.pop(flow.input.name, (0, None))
        if channel is None:
            return
        try:
            channel.delete()
        except ChannelBusy:  # another group reads from it too, and is not done
            with self._lock:
                self._channels[flow.input.name] = (flow.iteration, channel)
        except (ChannelError, CommError) as error:
            log.debug("channel %s was not deleted: %s", flow.input.name, error)

    def _discard(self) -> None:
        """Empty and forget the channels of iterations that failed.

        What a worker still holds it gives back once it has noticed; the next call gets that.
        """
        with self._lock:
            failed = dict(self._failed)
        for name, channel in failed.items():
            try:
                channel.close()
                with contextlib.suppress(ChannelClosed):
                    while True:
                        channel.get(timeout=0)
                channel.delete()
            except (ChannelTimeout, ChannelBusy):
                continue
            except (ChannelError, CommError) as error:
                log.debug("channel %s was not deleted: %s", name, error)
            with self._lock:
                self._failed.pop(name)
                self._channels.pop(name, None)

    def _submit(self, function: Callable[..., None], *args: object) -> bool:
        """Have it run away from the dispatching thread; False once the cluster is being closed."""
        try:
            self._settlers.submit(function, *args)
        except RuntimeError:
            return False
        return True

    def _background(self, function: Callable[[Flow], None], flow: Flow) -> Handle[None]:
        """Run what may block away from the dispatching thread that asks for it."""
        done: Handle[None] = Handle(f"settling the channels of {flow.input.name}", timeout_s=None)

        def run() -> None:
            try:
                function(flow)
            except Exception as error:  # noqa: BLE001 - a thread's edge; the handle carries it
                done.set_error(error)
            else:
                done.set_result(None)

        if not self._submit(run):
            done.set_error(ClusterClosed("the cluster was closed before a stage was settled"))
        return done


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

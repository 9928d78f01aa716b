"""The lanes of a simulator, the memory they share, and what is done when one of them is lost."""

import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.workers.bounds import Count, Natural, Positive
from rlinf.workers.engines.simulation.lane import Lane, Patience, find_spaces
from rlinf.workers.engines.simulation.memory import Memory, Sizes
from rlinf.workers.engines.simulation.seeds import episode_seed
from rlinf.workers.engines.simulation.stepper import Opening
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.roles.simulator import Actor, Field, Spaces

__all__ = ["Fleet", "SimulatorConfig", "SimulatorStatistics", "readable"]

LOOK_S = 0.25
"""How often lanes that do not answer are looked at; a quarter of the deadline if that is less."""


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """How environments are run.

    Attributes:
        environments: How many, of all lanes.
        lanes: Processes; 0: one a core. Several are needed for an actor outside of them.
        steps: Decisions of one trajectory at most.
        deadline_s: For one step or reset of one environment: one that is stuck is replaced.
        start_s: For one environment to be made.
        restarts: How often a lane's process may be lost with no trajectory completed in between.
        seed: Of episodes and noise.
        codec: By which pictures travel to the trainer, bit for bit: patches or patches_zlib; empty:
            as they are. Pays where the way is slower than the codec, so never on one host
            (`benchmarks/patches.py`).
    """

    environments: Count = 16
    lanes: Natural = 0
    steps: Count = 128
    deadline_s: Positive = 30.0
    start_s: Positive = 180.0
    restarts: Natural = 3
    seed: Natural = 0
    codec: str = ""


@dataclass(frozen=True, slots=True)
class SimulatorStatistics:
    """What a simulator has done so far.

    Attributes:
        steps: Actions carried out.
        episodes: That have ended.
        successes: Of these.
        lost_episodes: Whose process was lost.
        lost_processes: That died or were killed for being stuck.
    """

    steps: int = 0
    episodes: int = 0
    successes: int = 0
    lost_episodes: int = 0
    lost_processes: int = 0


class Fleet:
    """Environments in processes. Not thread-safe.

    Args:
        spec: The environment; one is made first to learn its spaces unless they are given.
        config: See `SimulatorConfig`.
        actor: Chooses; None: only actions from outside are carried out, one a step.

    Raises:
        EnvironmentLost: The environment cannot be made.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        config: SimulatorConfig | None = None,
        actor: Actor | None = None,
        spaces: Spaces | None = None,
    ) -> None:
        self._config = config = config or SimulatorConfig()
        self._spec, self._actor = spec, actor
        self.spaces = spaces or find_spaces(spec, config.start_s)
        sizes = _sizes(config, self.spaces, actor)
        self._light = bool(sizes.weights)
        self._memory = memory = Memory(self.spaces, sizes)
        self._counts = SimulatorStatistics()
        self.version = 0
        for index in range(config.environments):
            memory["begin"][index] = episode_seed(config.seed, index, 0)
        patience = Patience(config.deadline_s, config.start_s)
        cores = len(os.sched_getaffinity(0))
        lanes = min(config.lanes or cores, config.environments)
        self._lanes: list[Lane] = []
        for number, own in enumerate(np.array_split(np.arange(config.environments), lanes)):
            opening = Opening(
                path=tuple(sys.path),
                spec=spec,
                first=int(own[0]),
                count=len(own),
                seed=config.seed,
                spaces=self.spaces,
                sizes=sizes,
                descriptor=memory.descriptor,
                actor=actor if self._light else None,
            )
            self._lanes.append(Lane(number, opening, memory, patience))
        self._load()

    @property
    def lanes(self) -> int:
        """See `SimulatorEngine`."""
        return len(self._lanes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the lanes' processes."""
        return tuple(lane.pid for lane in self._lanes)

    def cpu_s(self) -> float:
        """Processor seconds that the processes there are now have spent."""
        return sum(lane.cpu_s() for lane in self._lanes)

    def statistics(self) -> SimulatorStatistics:
        """What was done so far."""
        return self._counts

    def lane_environments(self, lane: int) -> range:
        """Indexes of a lane's environments."""
        own = self._lanes[lane].own
        return range(own.start, own.stop)

    def _replace(self, lane: Lane, stuck: bool) -> None:
        lane.lose(stuck, self._config.restarts)
        for index in range(lane.own.start, lane.own.stop):
            self._next_episode(index)
        self._count(SimulatorStatistics(lost_processes=1))

    def _next_episode(self, index: int) -> None:
        memory = self._memory
        memory["episode"][index] += 1
        number = int(memory["episode"][index])
        memory["begin"][index] = episode_seed(self._config.seed, index, number)

    def _count(self, more: SimulatorStatistics) -> None:
        old = self._counts
        names = SimulatorStatistics.__slots__
        self._counts = SimulatorStatistics(
            **{name: getattr(old, name) + getattr(more, name) for name in names}
        )

    def _load(self) -> None:
        if self._light and self._actor is not None:
            self._memory["weights"][:] = self._actor.weights()

    def _pin(self) -> None:
        """A core a lane, of those that this process may use just now."""
        cores = sorted(os.sched_getaffinity(0))
        for lane in self._lanes:
            lane.pin([cores[lane.number % len(cores)]])

    @property
    def _look_s(self) -> float:
        return min(LOOK_S, self._config.deadline_s / 4)

    def onload(self) -> None:
        """See `Residency`: environments stay where they are, on the CPU."""

    def offload(self) -> None:
        """See `Residency`."""

    def resident_bytes(self) -> int:
        """Bytes on a device: none."""
        return 0

    def close(self) -> None:
        """End all processes, now. May be called again."""
        for lane in self._lanes:
            lane.kill()
        if self._lanes:
            self._memory.close()
        self._lanes = []


def _sizes(config: SimulatorConfig, spaces: Spaces, actor: Actor | None) -> Sizes:
    if actor is None:
        none = Field((0,))
        return Sizes(config.environments, config.steps, 1, none, 0, 0)
    return Sizes(
        environments=config.environments,
        steps=config.steps,
        chunk=actor.chunk,
        choice=actor.choice,
        weights=len(actor.weights()) if actor.light else 0,
        noise=actor.noise_size,
    )


def readable(lanes: Sequence[Lane], timeout_s: float) -> list[Lane]:
    """Those that have answered, or whose process has ended; waits for the first of them."""
    poll = select.poll()
    by_descriptor = {lane.fileno(): lane for lane in lanes}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(1000 * timeout_s)]

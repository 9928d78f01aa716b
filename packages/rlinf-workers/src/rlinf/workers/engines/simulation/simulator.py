"""A simulator whose environments live in processes: each lane goes at its own pace.

    lane 0   begin . act and step, act and step, ...             (a light actor: in the process)
    lane 1   begin . step     . step     . step                  (any other: between the steps,
    here             act lane 1 | act lane 2 | act lane 1          while other lanes step)

So a process never waits for another one, and with an actor of the simulator's own the lanes are its
batches: while it acts for one, the others step.
"""

import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.workers.bounds import Count, Natural, Positive
from rlinf.workers.engines.simulation.cut import cut_trajectory
from rlinf.workers.engines.simulation.lane import Lane, Patience, find_spaces
from rlinf.workers.engines.simulation.memory import Memory, Sizes
from rlinf.workers.engines.simulation.process import ACT, BEGIN, STEP, Opening
from rlinf.workers.engines.simulation.seeds import draw_noise, episode_seed
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.roles.simulator import (
    Actor,
    Array,
    CollectRequest,
    Field,
    FloatArray,
    Spaces,
    Trajectory,
)

__all__ = ["ProcessSimulator", "SimulatorConfig", "SimulatorStatistics"]

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
    """

    environments: Count = 16
    lanes: Natural = 0
    steps: Count = 128
    deadline_s: Positive = 30.0
    start_s: Positive = 180.0
    restarts: Natural = 3
    seed: Natural = 0


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


@dataclass(slots=True)
class _Job:
    """A request that is being carried out; `t` is the decision under way, -1 before the first."""

    index: int
    request: CollectRequest
    lane: Lane
    t: int = -1
    begun: bool = False


class ProcessSimulator:
    """A `SimulatorEngine`; also a plain vector of environments, by `reset` and `step`.

    Not thread-safe.

    Args:
        spec: The environment; one is made first to learn its spaces unless they are given.
        config: See `SimulatorConfig`.
        actor: Chooses; None: only `reset` and `step` are used, one action a step.

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

    def statistics(self) -> SimulatorStatistics:
        """What was done so far."""
        return self._counts

    def lane_environments(self, lane: int) -> range:
        """Indexes of a lane's environments."""
        own = self._lanes[lane].own
        return range(own.start, own.stop)

    # -- trajectories -----------------------------------------------------------------------------

    def collect(self, requests: Sequence[CollectRequest]) -> Iterator[tuple[int, Trajectory]]:
        """See `SimulatorEngine`.

        Raises:
            ValueError: Two requests for a lane, an unknown lane, or more steps than there is room.
            EnvironmentLost: A lane's process was lost again and again.
        """
        jobs = self._jobs(requests)
        self._pin()
        self._load()
        for job in jobs:
            if not job.lane.waiting:
                self._begin(job)
        while jobs:
            ready = _readable([job.lane for job in jobs], self._look_s)
            for job in list(jobs):
                done = None
                if job.lane in ready:
                    done = self._advance(job)
                elif job.lane.is_stuck(time.monotonic()):
                    done = self._lost(job, stuck=True)
                if done is not None:
                    jobs.remove(job)
                    yield job.index, done

    def _jobs(self, requests: Sequence[CollectRequest]) -> list[_Job]:
        seen = [request.lane for request in requests]
        if len(set(seen)) < len(seen) or not set(seen) <= set(range(self.lanes)):
            raise ValueError(f"lanes {seen} were asked for: each of 0 to {self.lanes - 1} once")
        for request in requests:
            size = len(self.lane_environments(request.lane))
            if request.steps > self._config.steps or len(request.seeds) not in (0, size):
                raise ValueError(
                    f"{request}: at most {self._config.steps} steps, and no seeds or {size}"
                )
        return [_Job(i, r, self._lanes[r.lane]) for i, r in enumerate(requests)]

    def _advance(self, job: _Job) -> Trajectory | None:
        """Go on after what has come from a lane; its trajectory at the end."""
        if not job.lane.answer():
            return self._lost(job, stuck=False)
        if not job.begun:
            self._begin(job)
        elif job.t < 0 and self._light:
            job.lane.tell(ACT, job.request.steps)
            job.t = job.request.steps - 1
        else:
            job.t += 1
            if job.t == job.request.steps or self._memory["resting"][job.lane.own].all():
                return self._finish(job)
            self._act(job)
            job.lane.tell(STEP, job.t)
        return None

    def _begin(self, job: _Job) -> None:
        memory, own, request = self._memory, job.lane.own, job.request
        actor = self._actor
        assert actor is not None, "a simulator without an actor cannot collect"
        if request.seeds:
            memory["begin"][own] = request.seeds
        memory["rests"][own] = bool(request.seeds)
        memory["greedy"][own] = request.greedy
        shape = (request.steps, actor.noise_size)
        for index in range(own.start, own.stop):
            if memory["resting"][index] and memory["begin"][index] < 0:
                self._next_episode(index)
            place = (self._config.seed, index, request.number)
            memory["noise"][: request.steps, index] = draw_noise(place, actor.noise, shape)
        job.begun = True
        job.lane.tell(BEGIN)

    def _act(self, job: _Job) -> None:
        memory, own, t = self._memory, job.lane.own, job.t
        assert self._actor is not None
        shown = {name: array[t, own] for name, array in memory.shown.items()}
        noise = None if job.request.greedy else memory["noise"][t, own]
        decision = self._actor.act(shown, noise)
        memory["choices"][t, own] = decision.choices
        memory["actions"][t, own] = decision.actions
        memory["logprobs"][t, own] = decision.logprobs

    def _finish(self, job: _Job) -> Trajectory:
        job.lane.failures = 0
        return self._cut(job, lost=False)

    def _lost(self, job: _Job, *, stuck: bool) -> Trajectory | None:
        """Replace the process. What it had completed is the trajectory; None: nothing had begun."""
        acting = job.begun and (job.t >= 0 or not (self._memory["begin"][job.lane.own] >= 0).any())
        lost = self._cut(job, lost=True) if acting else None
        self._replace(job.lane, stuck)
        job.begun, job.t = False, -1
        return lost

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

    def _cut(self, job: _Job, *, lost: bool) -> Trajectory:
        done = cut_trajectory(self._memory, job.lane.own, job.request, self.version, lost)
        ended = [episode for episode in done.episodes if not episode.lost]
        self._count(
            SimulatorStatistics(
                steps=done.token_count,
                episodes=len(ended),
                successes=sum(episode.success for episode in ended),
                lost_episodes=len(done.episodes) - len(ended),
            )
        )
        return done

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

    # -- a plain vector ---------------------------------------------------------------------------

    def reset(self, seeds: Mapping[int, int], *, rests: bool = False) -> Mapping[str, Array]:
        """Begin episodes in some environments, seeds by index; all others stay as they are.

        `rests`: those lanes rest after an end until they are reset again; otherwise the next
        episode begins by itself. Returns what all environments show, [E, ...]: views that the next
        step changes.
        """
        memory = self._memory
        touched = [lane for lane in self._lanes if any(i in seeds for i in _range(lane.own))]
        for lane in touched:
            memory["rests"][lane.own] = rests
        for index, seed in seeds.items():
            memory["begin"][index] = seed
        self._carry_out(touched, BEGIN)
        return self._shown_now()

    def step(self, actions: FloatArray) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """Carry out a decision of every environment, actions [E, C, A]; wait for all.

        Returns what they show now, and rewards, terminated, truncated, valid, steps, each [E]:
        views that the next step changes. Not valid: it rests, or its process was lost.
        """
        memory = self._memory
        memory["valid"][0] = False
        memory["actions"][0] = actions
        self._carry_out(self._lanes, STEP)
        names = ("rewards", "terminated", "truncated", "valid", "steps")
        return self._shown_now(), {name: memory[name][0] for name in names}

    def finals(self) -> Mapping[str, Array]:
        """What episodes ended with in the last `step`, [E, ...]; rows without an end are old."""
        return {name: array[0] for name, array in self._memory.final.items()}

    def _shown_now(self) -> Mapping[str, Array]:
        rows = self._memory["row"]
        if (rows == rows[0]).all():
            return {name: array[rows[0]] for name, array in self._memory.shown.items()}
        columns = np.arange(len(rows))
        return {name: array[rows, columns] for name, array in self._memory.shown.items()}

    def _carry_out(self, lanes: Sequence[Lane], letter: bytes) -> None:
        """Give a command to lanes and wait for all of them; lanes that are lost are replaced."""
        waiting = list(lanes)
        fresh = [lane for lane in lanes if lane.waiting]
        for lane in lanes:
            if lane not in fresh:
                lane.tell(letter)
        while waiting:
            ready = _readable(waiting, self._look_s)
            for lane in list(waiting):
                if lane in ready and lane.answer():
                    if lane in fresh:
                        fresh.remove(lane)
                        lane.tell(BEGIN if letter == STEP else letter)
                        continue
                    lane.failures = 0
                    waiting.remove(lane)
                elif lane in ready or lane.is_stuck(time.monotonic()):
                    self._replace(lane, lane not in ready)
                    fresh.append(lane)
                    if letter == STEP:
                        waiting.remove(lane)

    # -- residency --------------------------------------------------------------------------------

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


def _range(own: slice) -> range:
    return range(own.start, own.stop)


def _readable(lanes: Sequence[Lane], timeout_s: float) -> list[Lane]:
    poll = select.poll()
    by_descriptor = {lane.fileno(): lane for lane in lanes}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(1000 * timeout_s)]

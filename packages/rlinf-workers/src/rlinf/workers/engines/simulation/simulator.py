"""A simulator whose environments live in processes: each lane goes at its own pace.

    lane 0   begin . act and step, act and step, ...             (a light actor: in the process)
    lane 1   begin . step     . step     . step                  (any other: between the steps,
    here             act lane 1 | act lane 2 | act lane 1          while other lanes step)

So a process never waits for another one, and with an actor of the simulator's own the lanes are its
batches: while it acts for one, the others step.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf.workers.engines.simulation.cut import cut_trajectory
from rlinf.workers.engines.simulation.fleet import Fleet, SimulatorStatistics, readable
from rlinf.workers.engines.simulation.lane import Lane
from rlinf.workers.engines.simulation.process import ACT, BEGIN, STEP
from rlinf.workers.engines.simulation.seeds import draw_noise
from rlinf.workers.roles.simulator import CollectRequest, Decision, Observation, Trajectory

__all__ = ["Job", "ProcessSimulator"]


@dataclass(slots=True)
class Job:
    """A request that is being carried out; `t` is the decision under way, -1 before the first."""

    index: int
    request: CollectRequest
    lane: Lane
    version: int
    t: int = -1
    begun: bool = False


class ProcessSimulator(Fleet):
    """A `SimulatorEngine`; for its arguments see `Fleet`."""

    def collect(self, requests: Sequence[CollectRequest]) -> Iterator[tuple[int, Trajectory]]:
        """See `SimulatorEngine`.

        Raises:
            ValueError: Two requests for a lane, an unknown lane, or more steps than there is room.
            EnvironmentLost: A lane's process was lost again and again.
        """
        self._check(requests)
        jobs = [self._job(index, request) for index, request in enumerate(requests)]
        self._pin()
        self._load()
        for job in jobs:
            if not job.lane.waiting:
                self._begin(job)
        while jobs:
            ready = readable([job.lane for job in jobs], self._look_s)
            for job in list(jobs):
                done = None
                if job.lane in ready:
                    done = self._advance(job)
                elif job.lane.is_stuck(time.monotonic()):
                    done = self._lost(job, stuck=True)
                if done is not None:
                    jobs.remove(job)
                    yield job.index, done

    def _check(self, requests: Sequence[CollectRequest]) -> None:
        """Raise `ValueError` where they cannot be carried out side by side."""
        seen = [request.lane for request in requests]
        if len(set(seen)) < len(seen) or not set(seen) <= set(range(self.lanes)):
            raise ValueError(f"lanes {seen} were asked for: each of 0 to {self.lanes - 1} once")
        for request in requests:
            size = len(self.lane_environments(request.lane))
            if request.steps > self._config.steps or len(request.seeds) not in (0, size):
                raise ValueError(
                    f"{request}: at most {self._config.steps} steps, and no seeds or {size}"
                )

    def _job(self, index: int, request: CollectRequest) -> Job:
        return Job(index, request, self._lanes[request.lane], self.version)

    def _advance(self, job: Job) -> Trajectory | None:
        """Go on after what has come from a lane; its trajectory at the end."""
        if not job.lane.answer():
            return self._lost(job, stuck=False)
        if not job.begun:
            self._begin(job)
        elif job.t < 0 and self._light:
            job.lane.tell(ACT, job.request.steps)
            job.t = job.request.steps - 1
        elif self._is_over(job):
            return self._finish(job)
        else:
            self._act(job)
            job.lane.tell(STEP, job.t)
        return None

    def _is_over(self, job: Job) -> bool:
        """Whether there is no further decision to be made; else `job.t` is that one."""
        job.t += 1
        return job.t == job.request.steps or bool(self._memory["resting"][job.lane.own].all())

    def _begin(self, job: Job) -> None:
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

    def _act(self, job: Job) -> None:
        assert self._actor is not None
        noise = None if job.request.greedy else self._memory["noise"][job.t, job.lane.own]
        self._write(job, self._actor.act(self._seen(job), noise))

    def _seen(self, job: Job) -> Observation:
        """What the environments of its lane show now."""
        shown = self._memory.shown.items()
        return {name: array[job.t, job.lane.own] for name, array in shown}

    def _write(self, job: Job, decision: Decision) -> None:
        memory, own, t = self._memory, job.lane.own, job.t
        memory["choices"][t, own] = decision.choices
        memory["actions"][t, own] = decision.actions
        memory["logprobs"][t, own] = decision.logprobs

    def _finish(self, job: Job) -> Trajectory:
        job.lane.failures = 0
        return self._cut(job, lost=False)

    def _lost(self, job: Job, *, stuck: bool) -> Trajectory | None:
        """Replace the process. What it had completed is the trajectory; None: nothing had begun."""
        acting = job.begun and (job.t >= 0 or not (self._memory["begin"][job.lane.own] >= 0).any())
        lost = self._cut(job, lost=True) if acting else None
        self._replace(job.lane, stuck)
        job.begun, job.t = False, -1
        return lost

    def _cut(self, job: Job, *, lost: bool) -> Trajectory:
        done = cut_trajectory(self._memory, job.lane.own, job.request, job.version, lost)
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

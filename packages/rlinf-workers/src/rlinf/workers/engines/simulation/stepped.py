"""A simulator for a policy that is elsewhere: what lanes show goes out, decisions come back.

    request -> shown -> (somebody acts) -> acted -> shown -> ... -> acted -> trajectory

Lanes that are asked together are stepped together; the others stay as they are. So while a policy
acts for one group of lanes, another group steps.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlinf.workers.engines.simulation.fleet import SimulatorConfig, readable
from rlinf.workers.engines.simulation.process import STEP
from rlinf.workers.engines.simulation.simulator import Job, ProcessSimulator
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.roles.simulator import (
    Acted,
    Actor,
    CollectRequest,
    Decision,
    Field,
    FloatArray,
    Observation,
    Shown,
    Spaces,
    Trajectory,
)

__all__ = ["ActorElsewhere", "SteppedSimulator"]


@dataclass(slots=True)
class ActorElsewhere:
    """What a simulator has to know of an `Actor` that it does not have."""

    noise: Literal["normal", "uniform"]
    noise_size: int
    choice: Field
    chunk: int
    light: bool = field(default=False, init=False)

    @classmethod
    def of(cls, actor: Actor) -> "ActorElsewhere":
        """The stand-in of an actor."""
        return cls(actor.noise, actor.noise_size, actor.choice, actor.chunk)

    def act(self, observations: Observation, noise: FloatArray | None) -> Decision:
        """See `Actor`."""
        raise TypeError("this actor is elsewhere: it is shown what `advance` returns")

    def weights(self) -> FloatArray:
        """See `Actor`."""
        return np.zeros(0, np.float32)

    def load(self, weights: FloatArray) -> None:
        """See `Actor`."""


class SteppedSimulator(ProcessSimulator):
    """For its arguments see `Fleet`."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        config: SimulatorConfig,
        actor: ActorElsewhere,
        spaces: Spaces | None = None,
    ) -> None:
        super().__init__(spec, config, actor, spaces)
        self._open: dict[int, Job] = {}

    def advance(self, items: Sequence[CollectRequest | Acted]) -> list[Shown | Trajectory]:
        """Begin requests, carry out decisions; one answer an item, in order, once all are there.

        A trajectory answers the last decision of a request, or one during which its lane was lost.
        A decision for a request that nothing is known of any more (this simulator was started again
        meanwhile) is answered by a trajectory in which nothing is valid.

        Raises:
            ValueError: Two items for a lane, an unknown lane, or more steps than there is room.
            EnvironmentLost: A lane's process was lost again and again.
        """
        self._check([item if isinstance(item, CollectRequest) else item.request for item in items])
        self._pin()
        answers: dict[int, Shown | Trajectory] = {}
        waiting = []
        for index, item in enumerate(items):
            job = self._taken(index, item)
            if job is None:
                assert isinstance(item, Acted)
                answers[index] = self._cut(self._job(index, item.request), lost=True)
            else:
                waiting.append(job)
        while waiting:
            ready = readable([job.lane for job in waiting], self._look_s)
            for job in list(waiting):
                if job.lane not in ready and not job.lane.is_stuck(time.monotonic()):
                    continue
                answer = self._answered(job, stuck=job.lane not in ready)
                if answer is not None:
                    waiting.remove(job)
                    answers[job.index] = answer
                    if isinstance(answer, Trajectory):
                        del self._open[job.request.lane]
        return [answers[index] for index in range(len(items))]

    def _taken(self, index: int, item: CollectRequest | Acted) -> Job | None:
        """Begin a request or carry out a decision; None: its request is not known."""
        if isinstance(item, CollectRequest):
            job = self._open[item.lane] = self._job(index, item)
            if not job.lane.waiting:
                self._begin(job)
            return job
        known = self._open.get(item.request.lane)
        if known is None or known.request != item.request:
            return None
        known.index, known.version = index, item.version
        self._write(known, item.decision)
        known.lane.tell(STEP, known.t)
        return known

    def _answered(self, job: Job, *, stuck: bool) -> Shown | Trajectory | None:
        """After a lane's answer, or its loss; None: the process is being started again."""
        if stuck or not job.lane.answer():
            return self._lost(job, stuck=stuck)
        if not job.begun:
            self._begin(job)
            return None
        if self._is_over(job):
            return self._finish(job)
        noise = None if job.request.greedy else self._memory["noise"][job.t, job.lane.own].copy()
        return Shown(job.request, job.t, self._seen(job), noise)

"""A small program to try launchers, plans and failures with: sample -> score -> learn.

Plain numpy, deterministic: the outcome of a step depends on its prompts and on the model alone,
whatever is restarted, chunked or placed. `Fault` makes a chosen worker fail at a chosen item.
"""

import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf.comm import Request
from rlinf.sched import FlowGraph, Placement, temporal_plan
from rlinf.workers.cluster import Cluster
from rlinf.workers.devices import local_cores
from rlinf.workers.group import WorkerGroup, wait_all
from rlinf.workers.launch.base import Launcher
from rlinf.workers.records import StageReport
from rlinf.workers.worker import Worker, stage

__all__ = [
    "Fault",
    "Learner",
    "Sample",
    "Sampler",
    "Scorer",
    "launch",
    "placements",
    "prompts",
    "run_step",
    "shared_ray",
]

FloatArray = npt.NDArray[np.float64]
WIDTH = 16
_SHARED: list[Launcher] = []


@dataclass(frozen=True, slots=True)
class Sample:
    """What a sampler makes of one prompt, and, once judged, its reward."""

    number: int
    values: FloatArray
    reward: float = 0.0

    @property
    def token_count(self) -> int:
        """Its length."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Fault:
    """Fail when item `number` comes, in this incarnation only (None: in each).

    Attributes:
        kind: raise, exit (sys.exit), kill (SIGKILL), stop (SIGSTOP) or crash (reads address 0).
    """

    kind: str
    number: int
    incarnation: int | None = 0

    def strike(self, number: int, incarnation: int) -> None:
        """Fail, if it is time."""
        if number != self.number or self.incarnation not in (None, incarnation):
            return
        if self.kind == "raise":
            raise ValueError(f"item {number} is bad")
        if self.kind == "exit":
            sys.exit(3)
        if self.kind == "crash":
            ctypes.string_at(0)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])


class Sampler(Worker):
    """A streaming stage: yields the samples of a chunk in another order than it got the prompts."""

    def __init__(self, learner: str, fault: Fault | None = None) -> None:
        self.learner, self.fault = learner, fault
        self.weights = np.zeros(WIDTH)

    def recovered(self) -> None:
        """Fetch the current weights, as the dead incarnation had them."""
        self.load()

    def load(self) -> None:
        """Fetch the learner's weights, from its dispatching thread."""
        self.weights = np.array(self.endpoint.call("weights", None, to=self.learner).result())

    @stage
    def sample(self, prompts: list[int]) -> Iterator[tuple[int, Sample]]:
        """Prompts in, samples out, last one first."""
        for index in reversed(range(len(prompts))):
            number = prompts[index]
            if self.fault is not None:
                self.fault.strike(number, self.context.incarnation)
            draws = np.random.default_rng(number).normal(size=WIDTH)
            yield index, Sample(number, draws + self.weights)


class Scorer(Worker):
    """A chunk stage without state."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault

    @stage
    def score(self, samples: list[Sample]) -> list[Sample]:
        """The reward is the nearness of the values to 1."""
        if self.fault is not None:
            for sample in samples:
                self.fault.strike(sample.number, self.context.incarnation)
        return [
            Sample(s.number, s.values, -float(np.square(s.values - 1.0).mean())) for s in samples
        ]

    def pid(self) -> int:
        """The process it runs in."""
        return os.getpid()


class Learner(Worker):
    """A stage that gathers over its chunks and steps at the end; it cannot be restarted."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.weights = np.zeros(WIDTH)
        self.seen: dict[int, Sample] = {}
        self.loads = 0
        self.endpoint.serve("weights", self._serve)

    def _serve(self, request: Request) -> None:
        request.reply(self.weights)

    def onload(self) -> None:
        """Counts how often the device was taken."""
        self.loads += 1

    @stage(finish="step")
    def learn(self, samples: list[Sample]) -> int:
        """Gather; how many there were."""
        for sample in samples:
            if self.fault is not None:
                self.fault.strike(sample.number, self.context.incarnation)
            if sample.number in self.seen:
                raise ValueError(f"sample {sample.number} came twice")
            self.seen[sample.number] = sample
        return len(samples)

    def step(self) -> dict[str, Any]:
        """Move towards the mean of the samples; says which there were and their mean reward."""
        seen = [self.seen[number] for number in sorted(self.seen)]
        self.seen.clear()
        gradient = np.mean([1.0 - sample.values for sample in seen], axis=0)
        self.weights = self.weights + 0.5 * gradient
        reward = float(np.mean([sample.reward for sample in seen]))
        return {"numbers": [sample.number for sample in seen], "reward": reward}


def placements(kind: str, devices: Sequence[str], count: int) -> dict[str, Placement]:
    """Placements of the program: `temporal` on the first device, or `spatial` on the first two.

    The scorer needs no device of its own when they work side by side.
    """
    if kind == "temporal":
        graph = FlowGraph.chain("sampler", "scorer", "learner")
        return temporal_plan(graph, tuple(devices[:1]), count).placements()
    chunk = max(1, count // 4)
    return {
        "sampler": Placement("sampler", (devices[0],), chunk, shared=False, position=0),
        "scorer": Placement("scorer", (), chunk, shared=False, position=1),
        "learner": Placement("learner", (devices[1],), chunk, shared=False, position=2),
    }


def launch(
    cluster: Cluster, places: Mapping[str, Placement], faults: Mapping[str, Fault] | None = None
) -> tuple[WorkerGroup, WorkerGroup, WorkerGroup]:
    """Start sampler, scorer and learner, each with its fault, if any."""
    faults = faults or {}
    learner = Learner.group(cluster, faults.get("learner")).launch(places.get("learner"))
    sampler = Sampler.group(cluster, learner.ids[0], faults.get("sampler"))
    scorer = Scorer.group(cluster, faults.get("scorer"))
    return sampler.launch(places.get("sampler")), scorer.launch(places.get("scorer")), learner


def shared_ray() -> None:
    """Start Ray in this process unless it runs; clusters made here use it. Ends with the process.

    For test suites: starting Ray takes seconds, and a second cluster costs no more than its actors.
    """
    if not _SHARED:
        from rlinf.workers.launch.ray import RayLauncher

        launcher = RayLauncher(cores=len(local_cores()))
        launcher.nodes()
        _SHARED.append(launcher)
        atexit.register(launcher.close)


def prompts(step: int, count: int) -> list[int]:
    """The prompts of a step: numbers that occur in no other."""
    return [step * 10_000 + index for index in range(count)]


def run_step(
    cluster: Cluster, groups: Sequence[WorkerGroup], step: int, count: int = 12
) -> list[StageReport]:
    """One iteration over (sampler, scorer, learner); the first report of each stage.

    The outcome of the step is the `result` of the last report.
    """
    sampler, scorer, learner = groups
    sampler.load()
    asked, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
    asked.put_many(prompts(step, count))
    asked.close()
    reports = wait_all(
        [
            sampler.sample(asked, samples),
            scorer.score(samples, scored),
            learner.learn(scored),
        ],
        timeout=60,
    )
    return [ranks[0] for ranks in reports]

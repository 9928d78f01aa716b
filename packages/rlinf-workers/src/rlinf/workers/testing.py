"""A small program to try launchers, plans and failures with: sample -> score -> learn.

Plain numpy, deterministic: the outcome of a step depends on its prompts and on the model alone,
whatever is restarted, chunked, placed or repeated. `Fault` makes a chosen worker fail at a chosen
moment; no clock is involved.
"""

import atexit
import ctypes
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf.channel import Channel, ChannelUnknown, running_jobs
from rlinf.comm import Request
from rlinf.sched import FlowGraph, Placement, temporal_plan
from rlinf.workers.base import WorkerBase
from rlinf.workers.checkpoint import Checkpoints, SavedFile, seal
from rlinf.workers.cluster import Cluster
from rlinf.workers.devices import local_cores
from rlinf.workers.group import WorkerGroup, wait_all
from rlinf.workers.launch.base import Launcher
from rlinf.workers.messages import CONTROLLER
from rlinf.workers.records import StageReport
from rlinf.workers.recovery import Recovery
from rlinf.workers.worker import Worker, stage

__all__ = [
    "Fault",
    "Learner",
    "Sample",
    "Sampler",
    "Scorer",
    "files_left",
    "launch",
    "misbehave",
    "placements",
    "prompts",
    "run_step",
    "run_steps",
    "serve_strikes",
    "shared_ray",
    "wait_until_gone",
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
    """Fail when it comes to that, in this incarnation only (None: in each).

    Attributes:
        kind: raise, exit (sys.exit), kill (SIGKILL), stop (SIGSTOP) or crash (reads address 0).
        number: Of the item (busy), or of the time that the moment comes, from 1.
        moment: busy: the item is worked on; sync: weights are fetched or given; onload: the devices
            were just granted.
        victim: Another one is to fail at the moment of this worker: whoever serves "strike" at the
            controller is asked to see to it.
    """

    kind: str
    number: int
    incarnation: int | None = 0
    moment: str = "busy"
    victim: str = ""

    def strike(self, worker: WorkerBase, moment: str, number: int) -> None:
        """Fail, if it is time."""
        here = (moment, number) == (self.moment, self.number)
        if not here or self.incarnation not in (None, worker.context.incarnation):
            return
        if self.victim:
            worker.endpoint.call("strike", self, to=CONTROLLER).result()
        else:
            misbehave(self.kind)


def misbehave(kind: str) -> None:
    """Fail in this way, here and now; see `Fault.kind`."""
    if kind == "raise":
        raise ValueError("this is bad")
    if kind == "exit":
        sys.exit(3)
    if kind == "crash":
        ctypes.string_at(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def serve_strikes(cluster: Cluster) -> Callable[[Fault], None]:
    """Carry out, from the controller, what faults have in mind for their victims; also directly.

    Victims are "group/rank", the channel server by its name, or "controller": this process. Those
    are struck by signals; where a process runs no code of the program, SIGINT (KeyboardInterrupt)
    stands for an exception and SIGTERM for an exit.
    """
    signals = {
        "kill": signal.SIGKILL,
        "stop": signal.SIGSTOP,
        "raise": signal.SIGINT,
        "exit": signal.SIGTERM,
    }

    def strike(fault: Fault) -> None:
        pids = {s.worker: s.pid for s in cluster.statistics()} | {"controller": os.getpid()}
        pid = pids[fault.victim]
        assert pid is not None, f"{fault.victim} is just being started"
        os.kill(pid, signals[fault.kind])

    def answer(request: Request) -> None:
        strike(request.payload)
        request.reply(None)

    cluster.endpoint.serve("strike", answer)
    return strike


class Fallible(Worker):
    """A worker that fails when its fault says so."""

    fault: Fault | None = None
    moments: Counter[str]

    def reach(self, moment: str, number: int | None = None) -> None:
        """It has come to this moment, of which there was `number`, or one more than before."""
        if number is None:
            self.moments[moment] += 1
            number = self.moments[moment]
        if self.fault is not None:
            self.fault.strike(self, moment, number)

    def onload(self) -> None:
        """A moment of its own."""
        self.reach("onload")

    def misbehave(self, kind: str) -> None:
        """Fail while nothing else is to be done."""
        if self.context.incarnation == 0:
            misbehave(kind)


class Sampler(Fallible):
    """A streaming stage: yields the samples of a chunk in another order than it got the prompts."""

    def __init__(self, learner: str, fault: Fault | None = None) -> None:
        self.learner, self.fault, self.moments = learner, fault, Counter()
        self.weights = np.zeros(WIDTH)

    def recovered(self) -> None:
        """Fetch the current weights, as the dead incarnation had them."""
        self.load()

    def load(self) -> None:
        """Fetch the learner's weights, from its dispatching thread."""
        self.reach("sync")
        self.weights = np.array(self.endpoint.call("weights", None, to=self.learner).result())

    @stage
    def sample(self, prompts: list[int]) -> Iterator[tuple[int, Sample]]:
        """Prompts in, samples out, last one first."""
        for index in reversed(range(len(prompts))):
            number = prompts[index]
            self.reach("busy", number)
            draws = np.random.default_rng(number).normal(size=WIDTH)
            yield index, Sample(number, draws + self.weights)


class Scorer(Fallible):
    """A chunk stage without state."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault, self.moments = fault, Counter()

    @stage
    def score(self, samples: list[Sample]) -> list[Sample]:
        """The reward is the nearness of the values to 1."""
        for sample in samples:
            self.reach("busy", sample.number)
        return [
            Sample(s.number, s.values, -float(np.square(s.values - 1.0).mean())) for s in samples
        ]

    def pid(self) -> int:
        """The process it runs in."""
        return os.getpid()


class Learner(Fallible):
    """A stage that gathers over its chunks and steps at the end. Its state comes from checkpoints.

    `trained` is a part of it: the numbers of all samples that its weights have learnt from.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault, self.moments = fault, Counter()
        self.restore(None)
        self.endpoint.serve("weights", self._serve)

    def _serve(self, request: Request) -> None:
        self.reach("sync")
        request.reply(self.weights)

    def save(self, folder: str) -> list[SavedFile]:
        """Weights and what they have learnt from."""
        path = Path(folder) / f"{self.id.group}-{self.rank}.json"
        path.write_text(json.dumps({"weights": self.weights.tolist(), "trained": self.trained}))
        return [seal(path)]

    def restore(self, folder: str | None) -> None:
        """Become what was saved there; None: as constructed."""
        state = {"weights": [0.0] * WIDTH, "trained": []}
        if folder is not None:
            state = json.loads((Path(folder) / f"{self.id.group}-{self.rank}.json").read_text())
        self.weights = np.array(state["weights"])
        self.trained = [int(number) for number in state["trained"]]
        self.seen: dict[int, Sample] = {}

    def history(self) -> list[int]:
        """The numbers of all samples that the weights have learnt from, ascending."""
        return sorted(self.trained)

    @stage(finish="step")
    def learn(self, samples: list[Sample]) -> int:
        """Gather; how many there were."""
        for sample in samples:
            self.reach("busy", sample.number)
            if sample.number in self.seen:
                raise ValueError(f"sample {sample.number} came twice")
            self.seen[sample.number] = sample
        return len(samples)

    def step(self) -> dict[str, Any]:
        """Move towards the mean of the samples; says which there were and their mean reward."""
        seen = [self.seen[number] for number in sorted(self.seen)]
        self.seen.clear()
        self.trained += [sample.number for sample in seen]
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
    learner.wait_ready(60)
    sampler.load().result(60)
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


def run_steps(
    cluster: Cluster,
    groups: Sequence[WorkerGroup],
    checkpoints: Checkpoints,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """So many steps with checkpoints and recovery; the outcome of each, and last the history.

    `before` is called before each attempt at a step.
    """
    outcomes: dict[int, Any] = {}
    for attempt in Recovery(cluster, groups[2:], checkpoints).steps(steps):
        with attempt as step:
            before(step)
            outcomes[step] = run_step(cluster, groups, step)[-1].result
    [history] = groups[2].history().result(60)
    return [*(outcomes[step] for step in sorted(outcomes)), history]


def wait_until_gone(cluster: Cluster, channel: str) -> None:
    """Return once the server has forgotten a channel; raises `TimeoutError` after 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            Channel.connect(channel, cluster.endpoint)
        except ChannelUnknown:
            return
        time.sleep(0.01)  # it is deleted after those who wait for the stage were told
    raise TimeoutError(f"channel {channel} is still there")


def files_left(temporary: Path) -> list[Path]:
    """The files below a folder for temporary ones, once all jobs that ran there have ended.

    What tells the monitor of a job that was killed is not among them: looking for jobs removes it.
    """
    for folder in temporary.glob("rlinf-*"):
        assert running_jobs(folder) == ()
    return [path for path in temporary.rglob("*") if not path.is_dir()]

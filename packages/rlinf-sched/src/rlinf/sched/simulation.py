"""Executing a plan with what a profile averages away: lengths, tools, jitter, batching.

Continuous batching: an engine decodes ``slots`` requests together, one step costs
``step_s + request_step_s * active`` seconds, a request leaves when its tokens are out.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import Run, Timeline, evaluate
from rlinf.sched.fit import Floats
from rlinf.sched.graph import FlowGraph
from rlinf.sched.machine import Machine
from rlinf.sched.plan import Plan
from rlinf.sched.profile import ComponentProfile, Profile, Sample

Random = np.random.Generator
Lengths = Callable[[Random, int], Floats]
"""Draws the lengths, in tokens, of so many requests."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A component that generates by continuous batching.

    Attributes:
        lengths: of responses.
        group: requests of one item; they stay on one engine, and the item is out with the last.
        devices: of one engine.
        slots: requests decoded together by one engine.
        step_s: seconds of a decode step.
        request_step_s: added for every request in it.
        tool_s: seconds a request waits for tools in all, on average; exponential.
    """

    lengths: Lengths
    group: int = 1
    devices: int = 1
    slots: int = 128
    step_s: float = 0.0068
    request_step_s: float = 0.00013
    tool_s: float = 0.0

    def run(self, rng: Random, items: int, devices: int) -> Floats:
        """When each item is out, increasing; shape (items,)."""
        engines = max(1, devices // self.devices)
        lengths = np.maximum(1.0, self.lengths(rng, items * self.group)).reshape(items, -1)
        done = np.zeros(items)
        for k in range(min(engines, items)):
            mine = np.arange(k, items, engines)
            done[mine] = self._decode(lengths[mine].ravel()).reshape(len(mine), -1).max(axis=1)
        if self.tool_s:
            done += rng.exponential(self.tool_s, (items, self.group)).max(axis=1)
        return np.sort(done)

    def _decode(self, lengths: Floats) -> Floats:
        done = np.zeros(len(lengths))
        active = [(float(length), k) for k, length in enumerate(lengths[: self.slots])]
        heapq.heapify(active)
        waiting, now, tokens = len(active), 0.0, 0.0
        while active:
            length, k = heapq.heappop(active)
            now += (length - tokens) * (self.step_s + self.request_step_s * (len(active) + 1))
            tokens, done[k] = length, now
            if waiting < len(lengths):
                heapq.heappush(active, (tokens + float(lengths[waiting]), waiting))
                waiting += 1
        return done


@dataclass(frozen=True, slots=True)
class Reality:
    """What happens that a profile does not say.

    Attributes:
        engines: components that generate by continuous batching.
        jitter: relative standard deviation of each micro-batch's time.
    """

    engines: Mapping[str, Engine] = field(default_factory=dict)
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan took, in simulated iterations.

    Attributes:
        predicted_s: by the plan's model.
        seconds: of each iteration; shape (iterations,).
        last: the last iteration laid out in time.
    """

    predicted_s: float
    seconds: Floats
    last: Timeline

    @property
    def error(self) -> float:
        """Prediction against the mean of the iterations, relative."""
        return self.predicted_s / float(self.seconds.mean()) - 1


def simulate(
    plan: Plan,
    graph: FlowGraph,
    profile: Profile,
    reality: Reality,
    *,
    iterations: int = 8,
    seed: int = 0,
) -> Simulation:
    """Execute a plan some iterations long; the same seed gives the same times."""
    rng = np.random.default_rng(seed)
    model = CostModel(graph, profile, Machine.of(plan.devices, profile), plan.batch)
    predicted = evaluate(plan.root, model, plan.staleness)
    seconds, line = [], predicted
    for _ in range(iterations):
        stage = _stage(rng, plan, reality)
        line = evaluate(plan.root, model, plan.staleness, stage)
        seconds.append(line.seconds + profile.sync_s)
    return Simulation(predicted.seconds + profile.sync_s, np.array(seconds), line)


def _stage(rng: Random, plan: Plan, reality: Reality) -> Callable[[str, Floats, float], Run | None]:
    devices = {name: len(p.devices) for name, p in plan.placements().items()}

    def stage(name: str, ready: Floats, seconds: float) -> Run | None:
        parts = len(ready)
        engine = reality.engines.get(name)
        if engine is not None:
            outs = engine.run(rng, plan.batch, devices[name])
            last = -(-np.arange(1, parts + 1) * plan.batch // parts) - 1
            finish = np.maximum.accumulate(ready[0] + outs[last])
            return Run(np.r_[ready[0], finish[:-1]], finish, float(outs[-1]) / parts)
        if not reality.jitter:
            return None
        times = seconds * np.maximum(0.1, 1 + reality.jitter * rng.standard_normal(parts))
        ends = np.cumsum(times)
        finish = ends + np.maximum.accumulate(ready - np.r_[0.0, ends[:-1]])
        return Run(finish - times, finish, seconds)

    return stage


def profile_engine(
    engine: Engine, devices: tuple[int, ...], items: int, *, iterations: int = 3, seed: int = 0
) -> ComponentProfile:
    """Profile a simulated engine: mean times, and emission curves of some iterations."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    curves: list[tuple[int, tuple[float, ...]]] = []
    for n in devices:
        runs = [engine.run(rng, items, n) for _ in range(iterations)]
        samples += [Sample(n, items, float(run[-1])) for run in runs]
        mean = np.mean(runs, axis=0)
        curves.append((n, tuple(float(q) for q in mean / mean[-1])))
    return ComponentProfile(tuple(samples), emissions=tuple(curves))

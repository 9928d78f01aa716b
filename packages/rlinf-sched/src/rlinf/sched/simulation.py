"""Executing a plan with what a profile averages away: lengths, tools, jitter, batching.

Continuous batching: an engine decodes ``slots`` requests together, one step costs
``step_s + request_step_s * active`` seconds, a request leaves when its tokens are out.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.sched import document
from rlinf.sched.cost import CostModel
from rlinf.sched.document import Node
from rlinf.sched.errors import DocumentError, GraphError
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
class LogNormal:
    """Lengths with a long tail.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm.
        most: tokens after which a response is cut off.
    """

    median: float
    sigma: float
    most: float = np.inf

    def __call__(self, rng: Random, count: int) -> Floats:
        """Draw so many."""
        return np.minimum(rng.lognormal(np.log(self.median), self.sigma, count), self.most)


@dataclass(frozen=True, slots=True)
class Observed:
    """Lengths drawn from those that were seen."""

    lengths: tuple[float, ...]

    def __call__(self, rng: Random, count: int) -> Floats:
        """Draw so many."""
        return rng.choice(np.array(self.lengths), count)


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

    .. code-block:: yaml

        jitter: 0.03
        engines:
          rollout:
            lengths: {median: 2000, sigma: 0.8, most: 16384}    # or a list of observed ones
            group: 8                # the fields of Engine
            devices: 2
            tool_s: 1.5

    Attributes:
        engines: components that generate by continuous batching.
        jitter: relative standard deviation of each micro-batch's time.
    """

    engines: Mapping[str, Engine] = field(default_factory=dict)
    jitter: float = 0.0

    @classmethod
    def load(cls, path: str | Path) -> "Reality":
        """Read a YAML or JSON file.

        Raises:
            DocumentError: names the file, the path in it and the reason.
        """
        fields = document.load(path, DocumentError).fields((), ("engines", "jitter"))
        engines = fields["engines"].entries() if "engines" in fields else {}
        jitter = fields["jitter"].number() if "jitter" in fields else 0.0
        return cls({name: _read_engine(entry) for name, entry in engines.items()}, jitter)


def _read_engine(entry: Node) -> Engine:
    counts, times = ("group", "devices", "slots"), ("step_s", "request_step_s", "tool_s")
    fields = entry.fields(("lengths",), (*counts, *times))
    given: dict[str, Any] = {key: fields[key].integer(1) for key in counts if key in fields}
    given |= {key: fields[key].number() for key in times if key in fields}
    return Engine(_read_lengths(fields["lengths"]), **given)


def _read_lengths(node: Node) -> Lengths:
    if isinstance(node.value, Mapping):
        fields = node.fields(("median", "sigma"), ("most",))
        most = fields["most"].number(1) if "most" in fields else np.inf
        return LogNormal(fields["median"].number(1), fields["sigma"].number(), most)
    observed = tuple(item.number(1) for item in node.items())
    if not observed:
        node.fail("needs at least one length")
    return Observed(observed)


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
    """Execute a plan some iterations long; the same seed gives the same times.

    Raises:
        GraphError: an engine stands for no component of the plan.
    """
    for name in reality.engines.keys() - plan.placements().keys():
        known = ", ".join(plan.placements())
        raise GraphError(f"engine {name!r} is no component of the plan; those are {known}")
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

"""From a recorded run back to a workflow: what it was, and what re-planning would have done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.drift import DeviationRule, Factors, GainRule, Replay, replay
from rlinf.sched.errors import TraceError
from rlinf.sched.evaluate import evaluate
from rlinf.sched.graph import Component, FlowGraph
from rlinf.sched.machine import Machine
from rlinf.sched.plan import device_names
from rlinf.sched.planner import search
from rlinf.sched.profile import Profile
from rlinf.sched.profiler import Record
from rlinf.sched.trace import Span, profiler_of
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree
from rlinf.sched.workflow import Workflow

RULES = ("gain", "deviation")


def workflow_of(spans: Sequence[Span]) -> Workflow:
    """A workflow of what was recorded: a chain in the order of the first starts.

    The batch is the most items a run had, the machine as large as the largest run. Edges, sizes
    and memory are for a person to add.

    Raises:
        TraceError: no span says how many devices and items it had.
    """
    records = _records(spans)
    names = dict.fromkeys(record.component for record in records)
    profile = profiler_of(spans).profile()
    devices = device_names(max(record.devices for record in records))
    batch = round(max(record.items for record in records))
    return Workflow(FlowGraph.chain(*(Component(n) for n in names)), profile, devices, batch)


def recorded_factors(spans: Sequence[Span], workflow: Workflow) -> tuple[Factors, ...]:
    """Measured over profiled seconds of every component, one entry an iteration.

    There are as many iterations as the component with the fewest runs has; the runs of the others
    are parts of iterations, in equal numbers.

    Raises:
        TraceError: a component has no runs that say how many devices and items they had.
    """
    runs: dict[str, list[Record]] = {name: [] for name in workflow.profile.components}
    for record in _records(spans):
        if record.component in runs:
            runs[record.component].append(record)
    for name, found in runs.items():
        if not found:
            raise TraceError(f"the trace has no runs of {name!r} with devices and items")
    count = min(len(found) for found in runs.values())
    factors = {
        name: [_factor(workflow.profile, [found[k] for k in part]) for part in _parts(found, count)]
        for name, found in runs.items()
    }
    return tuple({name: factors[name][k] for name in factors} for k in range(count))


def replay_trace(
    spans: Sequence[Span], workflow: Workflow, *, rule: str = "gain", switch_s: float
) -> Replay:
    """What a re-planning rule would have done on a recorded run; see :func:`recorded_factors`.

    Args:
        rule: "gain" or "deviation".
        switch_s: seconds lost by a switch.
    """
    measured = recorded_factors(spans, workflow)
    planner = WorkflowPlanner(workflow)
    if rule == "deviation":
        return replay(measured, measured, planner, DeviationRule(), switch_s=switch_s)

    def gain(current: Callable[[], object]) -> GainRule:
        return GainRule(lambda factors: planner.saving(current(), factors), switch_s)

    return replay(measured, measured, planner, gain, switch_s=switch_s)


@dataclass(slots=True)
class WorkflowPlanner:
    """Plans of a workflow whose components became slower or faster, for a replay."""

    workflow: Workflow
    _known: dict[tuple[tuple[str, float], ...], Tree] = field(default_factory=dict)

    def best(self, factors: Factors) -> Tree:
        """The best plan for these factors, told apart to the hundredth."""
        rounded = {name: max(0.01, round(value, 2)) for name, value in factors.items()}
        key = tuple(sorted(rounded.items()))
        if key not in self._known:
            flow = self.workflow
            profile = flow.profile.scaled(rounded)
            plan = search(flow.graph, profile, flow.devices, flow.batch, staleness=flow.staleness)
            self._known[key] = plan.root
        return self._known[key]

    def seconds(self, plan: object, factors: Factors) -> float:
        """What a plan takes under these factors."""
        assert isinstance(plan, Leaf | Loop | Parallel | Spatial | Temporal), plan
        flow = self.workflow
        profile = flow.profile.scaled(factors)
        model = CostModel(flow.graph, profile, Machine.of(flow.devices, profile), flow.batch)
        return evaluate(plan, model, flow.staleness).seconds + profile.sync_s

    def saving(self, plan: object, factors: Factors) -> tuple[float, object]:
        """Seconds that the best plan saves against another one, and that plan."""
        best = self.best(factors)
        return self.seconds(plan, factors) - self.seconds(best, factors), best


def _records(spans: Sequence[Span]) -> tuple[Record, ...]:
    records = profiler_of(spans).records
    if not records:
        raise TraceError("no span says how many devices and items it had")
    return tuple(sorted(records, key=lambda record: record.start))


def _parts(found: Sequence[Record], count: int) -> Sequence[Sequence[int]]:
    return [part.tolist() for part in np.array_split(np.arange(len(found)), count)]


def _factor(profile: Profile, runs: Sequence[Record]) -> float:
    expected = sum(
        float(profile[r.component].seconds(np.array([r.devices], float), r.items, r.device_type)[0])
        for r in runs
    )
    return sum(run.seconds for run in runs) / expected

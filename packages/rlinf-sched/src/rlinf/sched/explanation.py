"""Why this plan: alternatives, bottleneck, idle time, how far the profile may be wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlinf.sched.config import SearchConfig
from rlinf.sched.cost import CostModel
from rlinf.sched.errors import InfeasibleError
from rlinf.sched.evaluate import Timeline, evaluate
from rlinf.sched.flips import Flip
from rlinf.sched.flips import flips as find_flips
from rlinf.sched.machine import Machine
from rlinf.sched.plan import Placement, Plan
from rlinf.sched.planner import search_model
from rlinf.sched.profile import Profile
from rlinf.sched.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Share:
    """What one component does with its devices.

    Attributes:
        busy: share of the iteration in which it works.
        idle: share in which its devices do nothing at all.
        device_seconds: devices times seconds of its work.
    """

    component: str
    busy: float
    idle: float
    device_seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Where the time of one plan goes.

    Attributes:
        kind: of the plan.
        devices: by component.
        busy_s: seconds each component works, by component; side by side they overlap.
        switch_s: seconds of switches.
        sync_s: seconds added to every iteration.
    """

    kind: str
    devices: dict[str, int]
    busy_s: dict[str, float]
    switch_s: float
    sync_s: float

    def text(self) -> str:
        """One line."""
        parts = [f"{n} {s:.4g} s on {self.devices[n]}" for n, s in self.busy_s.items()]
        parts += [f"switching {self.switch_s:.4g} s"] if self.switch_s else []
        parts += [f"synchronising {self.sync_s:.4g} s"] if self.sync_s else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan was chosen.

    Attributes:
        plan: the one explained.
        best_of_kind: the best temporal, spatial and hybrid plan, with seconds.
        costs: what each of those is made of.
        bottleneck: the component whose speed-up helps most.
        shares: of every component.
        flips: of every component; empty where not asked for.
        notes: what to know about the prediction, such as extrapolated times.
    """

    plan: Plan
    best_of_kind: dict[str, float]
    costs: tuple[Cost, ...]
    bottleneck: str
    shares: tuple[Share, ...]
    flips: tuple[Flip, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """All of it for a person to read."""
        lines = [self.plan.tree(), "", "best of each kind:"]
        own = self.plan.seconds or 0.0
        for kind, seconds in self.best_of_kind.items():
            lines.append(f"  {kind:9s} {seconds:10.2f} s  {100 * (seconds / own - 1):+6.1f} %")
            lines += [f"    {cost.text()}" for cost in self.costs if cost.kind == kind]
        lines += ["", f"bottleneck: {self.bottleneck}", "", "component        busy   idle"]
        lines += [
            f"  {s.component:14s} {100 * s.busy:4.0f} %  {100 * s.idle:4.0f} %" for s in self.shares
        ]
        if self.flips:
            lines += [
                "",
                "the plan changes when a component takes",
                "                 less than   more than   of its time",
            ]
            lines += [f"  {f.component:14s} {_factor(f)}" for f in self.flips]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain(
    workflow: Workflow,
    plan: Plan,
    *,
    flips: bool = True,
    watch: Callable[[Flip], None] = lambda _: None,
) -> Explanation:
    """Explain a plan of a workflow.

    Args:
        flips: also look how far each component's time may move; takes some searches for each.
        watch: called with each of these as it is known.
    """
    model = _model(workflow, workflow.profile)
    line = evaluate(plan.root, model, plan.staleness)
    plans = best_plans(workflow)
    known: list[Flip] = []
    for flip in find_flips(workflow, plan) if flips else ():
        known.append(flip)
        watch(flip)
    return Explanation(
        plan,
        {best.kind: best.seconds or 0.0 for best in plans},
        tuple(_cost(best, model) for best in plans),
        _bottleneck(workflow, plan),
        _shares(plan, line),
        tuple(known),
        tuple(_notes(workflow, plan)),
    )


def best_of_kind(workflow: Workflow) -> dict[str, float]:
    """Seconds of the best plan of each kind; kinds that do not fit are left out."""
    return {plan.kind: plan.seconds or 0.0 for plan in best_plans(workflow)}


def best_plans(workflow: Workflow) -> Sequence[Plan]:
    """The best plan of each kind that fits, the quickest first."""
    model = _model(workflow, workflow.profile)
    best = search_model(model, SearchConfig(), workflow.staleness)
    found = [best]
    for kind in ("temporal", "spatial", "hybrid"):
        if kind != best.kind:
            try:
                lag = 0 if kind == "temporal" else workflow.staleness
                plan = search_model(model, SearchConfig(kind=kind), lag)
            except InfeasibleError:
                continue
            if plan.kind == kind:
                line = evaluate(plan.root, model, plan.staleness)
                seconds = line.seconds + workflow.profile.sync_s
                found.append(replace(plan, seconds=seconds))
    return sorted(found, key=lambda plan: plan.seconds or 0.0)


def robust_plan(
    workflow: Workflow, *, noise: float = 0.1, samples: int = 16, seed: int = 0
) -> tuple[Plan, float]:
    """The plan with the least mean excess over profiles drawn around the given one.

    Every component's times are multiplied by a log-normal factor. The candidates are the best
    plans of those profiles.

    Returns:
        The plan, priced by the given profile, and its mean excess over each draw's own best.
    """
    rng = np.random.default_rng(seed)
    names = _profiled(workflow)
    draws = [dict.fromkeys(names, 1.0)]
    for _ in range(samples):
        draws.append({n: float(np.exp(noise * rng.standard_normal())) for n in names})
    models = [_model(workflow, workflow.profile.scaled(draw)) for draw in draws]
    plans = [search_model(model, SearchConfig(), workflow.staleness) for model in models]
    lag = workflow.staleness
    times = np.array([[evaluate(p.root, m, lag).seconds for m in models] for p in plans])
    excess = (times / times.min(axis=0) - 1).mean(axis=1)
    best = int(np.argmin(excess))
    seconds = float(times[best, 0]) + workflow.profile.sync_s
    chosen = plans[best]
    priced = Plan(
        chosen.root, chosen.devices, chosen.batch, seconds, chosen.staleness, chosen.bound
    )
    return priced, float(excess[best])


def _model(workflow: Workflow, profile: Profile) -> CostModel:
    machine = Machine.of(workflow.devices, profile)
    return CostModel(workflow.graph, profile, machine, workflow.batch)


def _profiled(workflow: Workflow) -> tuple[str, ...]:
    return tuple(workflow.profile.components)


def _bottleneck(workflow: Workflow, plan: Plan) -> str:
    """The component whose 10 % speed-up shortens this plan most."""
    gains = {}
    for name in _profiled(workflow):
        model = _model(workflow, workflow.profile.scaled({name: 0.9}))
        gains[name] = evaluate(plan.root, model, plan.staleness).seconds
    return min(gains, key=lambda name: gains[name])


def _cost(plan: Plan, model: CostModel) -> Cost:
    line = evaluate(plan.root, model, plan.staleness)
    places = plan.placements()
    devices = {n: len(_owned(n, places)) for n in line.runs}
    busy = {name: float((run.finish - run.start).sum()) for name, run in line.runs.items()}
    switch_s = sum(end - start for start, end, _ in line.switches)
    return Cost(plan.kind, devices, busy, switch_s, model.profile.sync_s)


def _shares(plan: Plan, line: Timeline) -> tuple[Share, ...]:
    total = line.seconds
    placements = plan.placements()
    working: dict[str, list[tuple[float, float]]] = {}
    busy = {}
    for name, run in line.runs.items():
        busy[name] = float((run.finish - run.start).sum())
        for device in _owned(name, placements):
            working.setdefault(device, []).append((float(run.start[0]), busy[name]))
    found = []
    for name, seconds in busy.items():
        devices = _owned(name, placements)
        used = np.mean([min(total, sum(s for _, s in working[d])) for d in devices])
        idle = 1 - float(used) / total
        found.append(Share(name, seconds / total, idle, seconds * len(devices)))
    return tuple(found)


def _owned(name: str, places: Mapping[str, Placement]) -> list[str]:
    """Devices of a component, or of all members of a cycle, each once."""
    return list(dict.fromkeys(d for member in name.split("+") for d in places[member].devices))


def _notes(workflow: Workflow, plan: Plan) -> Sequence[str]:
    notes = []
    for name, place in plan.placements().items():
        entry = workflow.profile.components.get(name)
        if entry is not None and not entry.covers(len(place.devices)):
            notes.append(f"{name} on {len(place.devices)} devices is far from what was measured")
    if plan.bound:
        notes.append(f"approximate: at most {100 * plan.bound:.2g} % above the best plan")
    return notes


def _factor(flip: Flip) -> str:
    slower = "never" if np.isinf(flip.slower) else f"{flip.slower:.2f}"
    quicker = "never" if not flip.quicker else f"{flip.quicker:.2f}"
    return f"{quicker:>9s}   {slower:>9s}"

"""Does `plan=auto` find the quickest way to run a program, and does it foresee how long that takes?

Stages whose cost is made up but real: sigmoids of an array, in small ones that do not gain from a
second core (as generation does not), in large ones that do (as training does), responses with a
long tail of lengths, memory that is copied when devices change hands. For every workload all plans
of a list are run in turn, round after round, and compared with the plan that `auto` chose. At last
responses get longer in mid-run: when is that noticed, is it planned for once, and what does moving
cost beside stopping and starting again?
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import exp
from pathlib import Path
from typing import Any

import torch
from harness import machine_line

from rlinf.sched import FlowGraph, Leaf, Plan, Spatial, Temporal
from rlinf.workers import Cluster, Decision, FlowPlanner, PlanningConfig, Worker, stage, wait_all
from rlinf.workers.planning import Program, foreseen_s, placed

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
MARKS = ("<!-- m2flow: begin -->", "<!-- m2flow: end -->")
BATCH = 32
STAGES = ("roll", "infer", "train")


@dataclass(frozen=True, slots=True)
class Stage:
    """The cost of a stage.

    Attributes:
        elements: Of an item's array. A pass over fewer than 32,768 takes one core; where a stage
            generates, those of all items under way make one array.
        passes: Over the array, for an item (where it generates: for a step of all items).
        per_call: The same for a call, whatever its items.
        state_mb: Copied on every onload and offload.
    """

    elements: int
    passes: int
    per_call: int = 0
    state_mb: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """A program: generation, perhaps inference, training.

    Attributes:
        steps: Median length of a response, in steps.
        tail: Standard deviation of the logarithm of the lengths.
    """

    name: str
    roll: Stage
    train: Stage
    infer: Stage | None = None
    steps: int = 30
    tail: float = 0.5

    @property
    def stages(self) -> tuple[str, ...]:
        """Its stages in order."""
        return tuple(name for name in STAGES if getattr(self, name) is not None)

    def lengths(self) -> list[int]:
        """Those of an iteration: quantiles of their distribution, always the same."""
        normal = statistics.NormalDist()
        shares = [(k + 0.5) / BATCH for k in range(BATCH)]
        return [max(1, round(self.steps * exp(self.tail * normal.inv_cdf(q)))) for q in shares]


ONE_CORE, ALL_CORES = 1 << 14, 1 << 20
WORKLOADS = (
    Workload("training scales well", Stage(512, 370), Stage(ALL_CORES, 45)),
    Workload("nothing scales", Stage(512, 930), Stage(ONE_CORE, 1300)),
    Workload("generation scales well", Stage(1 << 15, 60), Stage(ONE_CORE, 490), steps=20),
    Workload("long tail", Stage(512, 770), Stage(ONE_CORE, 1150), steps=20, tail=1.1),
    Workload("three stages", Stage(512, 700), Stage(ONE_CORE, 980), Stage(ONE_CORE, 490)),
    Workload("a small stage between", Stage(512, 700), Stage(ALL_CORES, 45), Stage(ONE_CORE, 330)),
    Workload("dear switches", Stage(512, 470, 0, 300), Stage(ALL_CORES, 30, 0, 300)),
    Workload("dear calls", Stage(512, 700), Stage(ONE_CORE, 650, per_call=2100)),
)


class Burner(Worker):
    """A stage that computes sigmoids."""

    together = 1
    """Items whose arrays are one."""

    def __init__(self, cost: Stage) -> None:
        self.cost = cost
        self.values = torch.ones(self.together * cost.elements)
        self.state = torch.zeros(cost.state_mb << 18)

    def onload(self) -> None:
        """Copies the state, as if it came from the host."""
        self.state = self.state.clone()

    def offload(self) -> None:
        """The way back."""
        self.state = self.state.clone()

    def burn(self, items: int, passes: int) -> None:
        """So many passes over the arrays of so many items."""
        values = self.values[: items * self.cost.elements]
        for _ in range(passes):
            torch.sigmoid(values, out=values)


class Roll(Burner):
    """Generates: all at once, those that are done leave, the others go on."""

    together = BATCH

    @stage
    def roll(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """One item a response, in the order of completion."""
        self.burn(1, self.cost.per_call)
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        done = 0
        for place, index in enumerate(order):
            steps, done = lengths[index] - done, lengths[index]
            self.burn(len(order) - place, steps * self.cost.passes)
            yield index, lengths[index]


class Infer(Burner):
    """A chunk in, a chunk out."""

    @stage
    def infer(self, items: list[int]) -> list[int]:
        """Works for every item."""
        self.burn(1, self.cost.per_call + self.cost.passes * len(items))
        return items


class Train(Burner):
    """The last one."""

    @stage
    def train(self, items: list[int]) -> int:
        """Works for every item."""
        self.burn(1, self.cost.per_call + self.cost.passes * len(items))
        return len(items)


CLASSES = {"roll": Roll, "infer": Infer, "train": Train}


@dataclass(slots=True)
class Bench:
    """One workload on a cluster, with its groups."""

    cluster: Cluster
    workload: Workload
    groups: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    def launch(self) -> None:
        """Start the groups, without a placement."""
        for name in self.workload.stages:
            cost = getattr(self.workload, name)
            self.groups[name] = CLASSES[name].group(self.cluster, cost, name=name).launch()
        wait_all([group.resident_bytes() for group in self.groups.values()])

    def iterate(self) -> float:
        """One iteration; its seconds."""
        self.step += 1
        work = self.workload
        start = time.perf_counter()
        names = ("asked", *work.stages[:-1])
        channels = dict(zip(names, self.cluster.channels(self.step, *names), strict=True))
        channels["asked"].put_many(work.lengths())
        channels["asked"].close()
        handles, source = [], channels["asked"]
        for name in work.stages:
            target = channels.get(name)
            call = getattr(self.groups[name], name)
            handles.append(call(source, target) if target is not None else call(source))
            source = target
        wait_all(handles)
        return time.perf_counter() - start


def plans(workload: Workload, devices: tuple[str, ...]) -> list[Plan]:
    """What `auto` is compared with: everything in turn, side by side, and mixed."""
    count = len(devices)
    one = max(1, count // 2)
    both = {name: Leaf(name, count) for name in workload.stages}
    half = {name: Leaf(name, one) for name in workload.stages}
    if len(workload.stages) == 2:
        a, b = workload.stages
        found = [Temporal(both[a], both[b])]
        found += [Spatial(half[a], half[b], parts) for parts in (2, 4, 8, 16, 32)]
    else:
        a, b, c = workload.stages
        found = [Temporal(both[a], Temporal(both[b], both[c]))]
        for parts in (4, 8, 16, 32):
            found += [
                Temporal(Spatial(half[a], half[b], parts), both[c]),
                Temporal(both[a], Spatial(half[b], half[c], parts)),
                Spatial(half[a], Temporal(half[b], half[c]), parts),
            ]
    return [Plan(tree, devices, BATCH) for tree in found]


def compare(bench: Bench, rounds: int) -> dict[str, object]:
    """Let `auto` choose, then run that plan beside all others."""
    decisions: list[Decision] = []
    planner = FlowPlanner(bench.cluster, "auto", PlanningConfig(rule="never"), decisions.append)
    for _ in planner.steps(range(40)):
        bench.iterate()
        if decisions[-1].plan is not None:
            break
    chosen, known = decisions[-1].plan, decisions[-1].workflow
    assert chosen is not None and known is not None
    rivals = {"auto": chosen}
    rivals |= {describe(plan): plan for plan in plans(bench.workload, bench.cluster.devices)}
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, plan in rivals.items():
            _move(bench, plan, known.graph)
            bench.iterate()
            taken[name] += [bench.iterate() for _ in range(2)]
    rows = [
        {
            "plan": describe(plan),
            "kind": plan.kind,
            "measured_s": round(statistics.median(taken[name]), 4),
            "error": round(foreseen_s(known, plan) / statistics.median(taken[name]) - 1, 3),
        }
        for name, plan in rivals.items()
    ]
    best = min(list(rivals)[1:], key=lambda name: statistics.median(taken[name]))
    pairs = zip(taken["auto"], taken[best], strict=True)
    return {
        "of_best": round(statistics.median(a / b for a, b in pairs), 3),
        "best": best,
        "auto": rows[0],
        "plans": rows[1:],
    }


BEFORE = WORKLOADS[0]
AFTER = replace(BEFORE, steps=8 * BEFORE.steps)
"""Responses become eight times as long: training is no longer what takes the time."""
WINDOW = 4


def change(rounds: int) -> dict[str, object]:
    """A step change of the lengths in mid-run, what the planner makes of it, and what it costs."""
    decisions: list[Decision] = []
    config = PlanningConfig(rule="deviation", window=WINDOW)
    with Cluster(launcher="ray") as cluster:
        bench = Bench(cluster, BEFORE)
        bench.launch()
        planner = FlowPlanner(cluster, "auto", config, decisions.append)
        taken, planned, changed, noticed = [], [], 0, 0
        for number in planner.steps(range(80)):
            taken.append(bench.iterate())
            plans_so_far = sum(decision.plan is not None for decision in decisions)
            planned += [number] * (plans_so_far - len(planned))
            if planned and not changed and number >= planned[0] + 2 * WINDOW:
                changed, known_so_far, bench.workload = number, len(decisions), AFTER
            if changed and not noticed and len(decisions) > known_so_far:
                noticed = number - changed - 1  # it is tried before the iteration it is tried in
            if len(planned) > 1 and number >= planned[1] + 3 * WINDOW:
                break
        after = statistics.median(taken[planned[1] + 1 :]) if len(planned) > 1 else 0.0
        chosen = [decision for decision in decisions if decision.plan is not None]
        known = chosen[-1].workflow
        assert known is not None and chosen[0].plan is not None and chosen[-1].plan is not None
        rivals = plans(bench.workload, cluster.devices)
        best = min(_seconds(bench, plan, known.graph, rounds) for plan in rivals)
        pair = chosen[0].plan, chosen[-1].plan
        live = statistics.median(_move(bench, plan, known.graph) for plan in (*pair, *pair)[1:])
        swings = wave(bench, config)
        stopping = time.perf_counter()
    with Cluster(launcher="ray") as again:
        Bench(again, AFTER).launch()
        stopped = time.perf_counter() - stopping
    found: dict[str, object] = {
        "before": describe(pair[0]),
        "after": describe(pair[1]),
        "noticed_after": noticed,
        "followed_after": planned[1] - changed if len(planned) > 1 else None,
        "plans_made": len(planned) - 1,
        "of_best": round(after / best, 3),
        "live_switch_s": round(live, 4),
        "full_stop_s": round(stopped, 2),
        "square_wave_plans": swings,
    }
    print(f"\n  a step change: {found}")
    return found


def wave(bench: Bench, config: PlanningConfig) -> int:
    """How often a plan is made for lengths that swing to and fro, three times."""
    decisions: list[Decision] = []
    bench.workload = BEFORE
    begun = None
    for number in FlowPlanner(bench.cluster, "auto", config, decisions.append).steps(range(70)):
        bench.iterate()
        if begun is None and decisions[-1].plan is not None:
            begun = number
        if begun is not None:
            bench.workload = AFTER if (number - begun) // (2 * WINDOW) % 2 else BEFORE
            if number - begun == 12 * WINDOW:
                break
    return sum(decision.plan is not None for decision in decisions) - 1


def _move(bench: Bench, plan: Plan, graph: FlowGraph) -> float:
    """Seconds it takes to have everybody where a plan says."""
    began = time.perf_counter()
    program = Program(graph, BATCH, frozenset({"roll"}))
    wait_all([bench.groups[n].move(p, BATCH) for n, p in placed(plan, program).items()])
    return time.perf_counter() - began


def _seconds(bench: Bench, plan: Plan, graph: FlowGraph, rounds: int) -> float:
    """The median iteration with a plan, after one that warms up."""
    _move(bench, plan, graph)
    return statistics.median([bench.iterate() for _ in range(4 * rounds + 1)][1:])


def describe(plan: Plan) -> str:
    """A plan in a line."""
    return _line(plan.root)


def _line(tree: Any) -> str:
    if isinstance(tree, Leaf):
        return f"{tree.component}@{tree.devices}"
    first, second = _line(tree.first), _line(tree.second)
    if isinstance(tree, Spatial):
        return f"({first} |{tree.micro_batches} {second})"
    return f"({first} ; {second})" if isinstance(tree, Temporal) else f"({first} || {second})"


def measure(quick: bool) -> dict[str, object]:
    """All workloads, see `compare`, as a table; then `change`. The page has that of a full run."""
    questions: dict[str, Any] = {}
    for workload in WORKLOADS:
        with Cluster(launcher="ray") as cluster:
            bench = Bench(cluster, workload)
            bench.launch()
            questions[workload.name] = found = compare(bench, 1 if quick else 3)
        print(f"{workload.name}: chose {found['auto']}, {found['of_best']} of {found['best']}")
        for row in found["plans"]:
            print(f"    {row}")
    body = table(questions)
    print(f"\n{body}")
    if not quick:
        page = PAGE.read_text()
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[-1]
        PAGE.write_text(f"{before}{MARKS[0]}\n{body}\n{MARKS[1]}{after}")
    questions["a step change"] = change(1 if quick else 3)
    return questions


def table(found: dict[str, Any]) -> str:
    """Markdown: a line a workload."""
    lines = [
        machine_line() + ".",
        "",
        "| program | `auto` chose | it took | of the best | foreseen: temporal | spatial, hybrid |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        errors = {True: [], False: []}  # type: dict[bool, list[float]]
        for row in one["plans"]:
            errors[row["kind"] == "temporal"].append(100 * row["error"])
        ends = (
            f"{errors[True][0]:+.1f} % | {min(errors[False]):+.1f} to {max(errors[False]):+.1f} %"
        )
        auto = one["auto"]
        lines.append(
            f"| {name} | `{auto['plan'].replace('|', '/')}` | {auto['measured_s']:.3f} s "
            f"| {one['of_best']:.2f} | {ends} |"
        )
    return "\n".join(lines)

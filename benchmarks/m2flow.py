"""Does `plan=auto` find the quickest way to run a program, and does it foresee how long that takes?

Stages whose cost is made up but real: products of matrices, small ones that hardly gain from a
second core (as in generation), large ones that do (as in training), responses with a long tail of
lengths, memory that is copied when devices change hands. For every workload all plans of a list
are run in turn, round after round, and compared with the plan that `auto` chose. At last responses
get longer in mid-run: when is that noticed, is it planned for once, and what does moving cost
beside stopping and starting again?
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from harness import time_of

from rlinf.sched import FlowGraph, Leaf, Plan, Spatial, Temporal, predict
from rlinf.workers import Cluster, Decision, FlowPlanner, PlanningConfig, Worker, stage, wait_all
from rlinf.workers.planning import Program, placed

BATCH = 32
STAGES = ("roll", "infer", "train")


@dataclass(frozen=True, slots=True)
class Stage:
    """The cost of a stage.

    Attributes:
        width: Matrices are so wide: below 300 or so, a second core does not help.
        rows: Rows multiplied for an item (per step, where it generates).
        repeats: Products for an item (where it generates: for a step of the whole batch).
        per_call: Products for a call, whatever its items.
        state_mb: Copied on every onload and offload.
    """

    width: int
    rows: int
    repeats: int
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
    steps: int = 60
    tail: float = 0.5

    @property
    def stages(self) -> tuple[str, ...]:
        """Its stages in order."""
        return tuple(name for name in STAGES if getattr(self, name) is not None)


SMALL = Stage(width=160, rows=1, repeats=40)
LARGE = Stage(width=768, rows=256, repeats=2)
WORKLOADS = (
    Workload("training scales well", SMALL, LARGE, steps=20),
    Workload("nothing scales", SMALL, Stage(160, 16, 220)),
    Workload("generation scales well", Stage(640, 8, 4), Stage(160, 16, 90)),
    Workload("long tail", SMALL, Stage(160, 16, 180), steps=40, tail=1.1),
    Workload("three stages", SMALL, Stage(160, 16, 130), Stage(160, 16, 130)),
    Workload("a small stage between", SMALL, LARGE, Stage(160, 16, 60), steps=40),
    Workload(
        "dear switches", Stage(160, 1, 40, state_mb=300), Stage(512, 64, 4, state_mb=300), steps=30
    ),
    Workload("dear calls", SMALL, Stage(768, 128, 1, per_call=40), steps=20),
)


class Burner(Worker):
    """A stage that multiplies matrices."""

    def __init__(self, cost: Stage) -> None:
        self.cost = cost
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.randn(cost.width, cost.width, generator=generator) / cost.width**0.5
        self.state = torch.zeros(cost.state_mb << 18)

    def onload(self) -> None:
        """Copies the state, as if it came from the host."""
        self.state = self.state.clone()

    def offload(self) -> None:
        """The way back."""
        self.state = self.state.clone()

    def burn(self, rows: int, times: int) -> None:
        """So many products."""
        value = torch.ones(rows, self.cost.width)
        for _ in range(times):
            value = value @ self.matrix


class Roll(Burner):
    """Generates: all at once, those that are done leave, the others go on."""

    @stage
    def roll(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """One item a response, in the order of completion."""
        self.burn(self.cost.rows, self.cost.per_call)
        order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        done = 0
        for place, index in enumerate(order):
            active = len(order) - place
            for _ in range(lengths[index] - done):
                self.burn(active * self.cost.rows, self.cost.repeats)
            done = lengths[index]
            yield index, lengths[index]


class Infer(Burner):
    """A chunk in, a chunk out."""

    @stage
    def infer(self, items: list[int]) -> list[int]:
        """Works for every item."""
        self.burn(self.cost.rows, self.cost.per_call)
        self.burn(self.cost.rows, self.cost.repeats * len(items))
        return items


class Train(Burner):
    """The last one."""

    @stage
    def train(self, items: list[int]) -> int:
        """Works for every item."""
        self.burn(self.cost.rows, self.cost.per_call)
        self.burn(self.cost.rows, self.cost.repeats * len(items))
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
        draws = np.random.default_rng(self.step % 4).normal(size=BATCH)
        lengths = np.maximum(1, work.steps * np.exp(work.tail * draws)).astype(int)
        start = time.perf_counter()
        names = ("asked", *work.stages[:-1])
        channels = dict(zip(names, self.cluster.channels(self.step, *names), strict=True))
        channels["asked"].put_many([int(length) for length in lengths])
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
    for number in range(rounds + 1):
        for name, plan in rivals.items():
            _move(bench, plan, known.graph)
            # Four iterations have four sets of lengths; together they are the workload.
            seconds = statistics.fmean(bench.iterate() for _ in range(4))
            taken[name] += [seconds] if number else []
    rows = [
        {
            "plan": name,
            "kind": plan.kind,
            "measured_s": round(statistics.median(taken[name]), 4),
            "predicted_s": round(predict(known, plan).seconds, 4),
        }
        for name, plan in rivals.items()
    ]
    auto, others = rows[0], sorted(rows[1:], key=lambda row: float(str(row["measured_s"])))
    quicker = statistics.median(
        a / b for a, b in zip(taken["auto"], taken[str(others[0]["plan"])], strict=True)
    )
    return {
        "chosen": describe(chosen),
        "kind": chosen.kind,
        "measured_s": auto["measured_s"],
        "predicted_s": auto["predicted_s"],
        "error": round(float(str(auto["predicted_s"])) / float(str(auto["measured_s"])) - 1, 3),
        "best": others[0]["plan"],
        "best_s": others[0]["measured_s"],
        "of_best": round(quicker, 3),
        "plans": [auto, *others],
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
        taken, planned, changed = [], [], 0
        for number in planner.steps(range(80)):
            taken.append(bench.iterate())
            plans_so_far = sum(decision.plan is not None for decision in decisions)
            planned += [number] * (plans_so_far - len(planned))
            if planned and not changed and number >= planned[0] + 2 * WINDOW:
                changed, bench.workload = number, AFTER
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
        stopping = time.perf_counter()
    with Cluster(launcher="ray") as again:
        Bench(again, AFTER).launch()
        stopped = time.perf_counter() - stopping
    found: dict[str, object] = {
        "before": describe(pair[0]),
        "after": describe(pair[1]),
        "noticed_after": planned[1] - changed if len(planned) > 1 else None,
        "plans_made": len(planned) - 1,
        "of_best": round(after / best, 3),
        "live_switch_s": round(live, 4),
        "full_stop_s": round(stopped, 2),
    }
    print(f"\n  a step change: {found}")
    return found


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
    """All workloads; see `compare`."""
    questions: dict[str, object] = {}
    print(
        f"\n  {'workload':24}{'auto chose':34}{'measured':>11}{'foreseen':>10}{'of the best':>12}"
    )
    for workload in WORKLOADS[: 2 if quick else None]:
        with Cluster(launcher="ray") as cluster:
            bench = Bench(cluster, workload)
            bench.launch()
            found = compare(bench, 1 if quick else 3)
        questions[workload.name] = found
        print(
            f"  {workload.name:24}{found['chosen']!s:34}"
            f"{time_of(float(str(found['measured_s'])) * 1e6):>11}"
            f"{100 * float(str(found['error'])):>+9.1f}%{found['of_best']!s:>12}"
            f"   best: {found['best']}"
        )
    if not quick:
        questions["a step change"] = change(1)
    return questions

"""What records say about a program, and what is decided from it, in a made-up world."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from rlinf.sched import FlowGraph, Placement, Plan, search, temporal_plan
from rlinf.workers import ChunkRecord, ConfigError, PlanningConfig
from rlinf.workers.course import Choice, Decision, course
from rlinf.workers.devices import for_each_group, rank_places
from rlinf.workers.planning import Iteration, Program, busy_s, in_turn, placed, probes, workflow

CORES = ("core:0", "core:1", "core:2", "core:3")
CHANNELS = {"rollout": ("prompts", "samples"), "reward": ("samples", "scored")}
CHANNELS["trainer"] = ("scored", "")


def record(
    group: str,
    *,
    items: int,
    seconds: float,
    start: float = 0.0,
    rank: int = 0,
    emitted: tuple[float, ...] | None = None,
    onload_s: float = 0.0,
) -> ChunkRecord:
    source, target = CHANNELS[group]
    end = start + seconds
    return ChunkRecord(
        worker=f"{group}/{rank}",
        stage="work" if items else "finish",
        iteration=1,
        input=source,
        output=target,
        start=start,
        end=end,
        seconds=seconds,
        waited_s=0.0,
        locked_s=0.0,
        onload_s=onload_s,
        offload_s=0.0,
        resident_bytes=100,
        items_in=items,
        items_out=items if target else 0,
        tokens=0,
        emitted=emitted if emitted is not None else (end,) * items,
    )


@dataclass
class World:
    """Groups with a cost of a call and of an item, which scale with the devices."""

    call_s: dict[str, float]
    item_s: dict[str, float]
    batch: int = 32
    scaling: float = 1.0
    streams: tuple[str, ...] = ()
    history: list[Mapping[str, Placement]] = field(default_factory=list)

    def chunk_s(self, group: str, devices: int, items: int) -> float:
        return float((self.call_s[group] + self.item_s[group] * items) / devices**self.scaling)

    def run(self, places: Mapping[str, Placement]) -> Iteration:
        """Take turns where devices are shared; otherwise the longest decides."""
        self.history.append(places)
        records: list[ChunkRecord] = []
        clock = 0.0
        for group in CHANNELS:
            if group not in places:
                records.append(record(group, items=self.batch, seconds=1e-6, start=clock))
                continue
            place, left, begin = places[group], self.batch, clock
            while left:
                items = min(left, place.chunk or left)
                seconds = self.chunk_s(group, len(place.devices), items)
                ends = (
                    tuple(clock + seconds * k / items for k in range(1, items + 1))
                    if group in self.streams
                    else None
                )
                records.append(
                    record(group, items=items, seconds=seconds, start=clock, emitted=ends)
                )
                clock, left = clock + seconds, left - items
            if not place.shared:
                clock = begin
        spent = {name: sum(r.seconds for r in records if r.group == name) for name in places}
        alone = [seconds for name, seconds in spent.items() if not places[name].shared]
        turns = sum(seconds for name, seconds in spent.items() if places[name].shared)
        return Iteration(max([turns, *alone]) + 0.01, tuple(records), places)


def follow(
    world: World,
    choice: str | Plan,
    iterations: int,
    config: PlanningConfig | None = None,
    change: Callable[[int], None] = lambda _: None,
    ranks: Mapping[str, int] | None = None,
    devices: tuple[str, ...] = CORES,
) -> list[Decision]:
    """Run the program for so many iterations as the course says."""
    wanted = ranks or dict.fromkeys(("trainer", "rollout"), 1)
    decisions = course(Choice.of(choice), config or PlanningConfig(), devices, wanted)
    decision = next(decisions)
    taken = [decision]
    places: Mapping[str, Placement] = {}
    for number in range(iterations):
        change(number)
        places = decision.placements or places
        decision = decisions.send(world.run(places))
        taken.append(decision)
    return taken


def plans(decisions: list[Decision]) -> list[Plan]:
    return [decision.plan for decision in decisions if decision.plan is not None]


def test_the_graph_is_read_from_the_channels() -> None:
    world = World(dict.fromkeys(CHANNELS, 0.1), dict.fromkeys(CHANNELS, 0.01), streams=("rollout",))
    ranks = {"trainer": 1, "rollout": 2}
    first = world.run(in_turn(("rollout", "trainer"), CORES))
    program = Program.of(first.records, ranks, len(CORES))
    assert program.graph.names == ("rollout", "trainer")
    assert program.graph.edges == (("rollout", "trainer"),)
    assert program.graph["rollout"].sizes == (2, 4)
    assert program.batch == 32 and program.whole == {"rollout"}


def test_a_stage_that_is_fed_by_another_is_never_taken_whole() -> None:
    world = World(dict.fromkeys(CHANNELS, 0.1), dict.fromkeys(CHANNELS, 0.01))
    world.streams = ("reward", "trainer")
    first = world.run(in_turn(tuple(CHANNELS), CORES))
    program = Program.of(first.records, dict.fromkeys(CHANNELS, 1), 4)
    assert program.graph.edges == (("reward", "trainer"), ("rollout", "reward"))
    assert program.whole == frozenset()


def test_a_program_without_stages_to_plan_is_an_error() -> None:
    with pytest.raises(ValueError, match="no stage of a group that can be planned"):
        Program.of([record("reward", items=3, seconds=1.0)], {"trainer": 1}, 2)


def test_probes_cover_every_size_in_whole_and_in_chunks() -> None:
    world = World(dict.fromkeys(CHANNELS, 0.1), dict.fromkeys(CHANNELS, 0.01), streams=("rollout",))
    first = world.run(in_turn(tuple(CHANNELS), CORES))
    program = Program.of(first.records, {"rollout": 1, "trainer": 1}, len(CORES))
    wanted = probes(program, CORES, 8)
    sizes = [{len(place.devices) for place in probe.placements.values()} for probe in wanted]
    assert sizes == [{4}] * 2 + [{2}] * 3 + [{1}] * 3
    assert [probe.counts for probe in wanted] == [True] * 2 + [False, True, True] * 2
    assert {probe.placements["trainer"].chunk for probe in wanted} == {None, 4}
    assert {probe.placements["rollout"].chunk for probe in wanted} == {None}


def test_probes_leave_out_sizes_that_some_group_cannot_use() -> None:
    world = World(dict.fromkeys(CHANNELS, 0.1), dict.fromkeys(CHANNELS, 0.01))
    ranks = {"rollout": 2, "trainer": 1}
    program = Program.of(world.run(in_turn(("rollout", "trainer"), CORES)).records, ranks, 4)
    smallest = min(len(p.placements["trainer"].devices) for p in probes(program, CORES, 8))
    assert smallest == 2


def test_a_profile_has_the_times_of_calls_ranks_and_what_comes_at_the_end() -> None:
    places = {"trainer": Placement("trainer", CORES[:2], 4, True, 0)}
    chunks = [
        record("trainer", items=4, seconds=1.0, start=k, rank=k % 2, onload_s=0.25)
        for k in range(4)
    ]
    finish = [record("trainer", items=0, seconds=0.4, start=9.0, rank=k) for k in range(2)]
    iteration = Iteration(20.0, (*chunks, *finish), places)
    assert busy_s("trainer", iteration) == pytest.approx(2.4)
    assert busy_s("rollout", iteration) == 0.0
    program = Program.of(chunks, {"trainer": 2}, 4)
    [entry] = workflow(program, [iteration], CORES).profile.components.values()
    [sample] = entry.samples
    # Two ranks with chunks of 4 take 8 items in the time of one chunk and half a finish.
    assert (sample.devices, sample.batch) == (2, 8.0)
    assert sample.seconds == pytest.approx(1.2)
    assert entry.onload_s == pytest.approx(1.0 / 6) and entry.active_bytes == 100


def test_cores_are_a_second_resource_beside_accelerators_only() -> None:
    cards = ("cuda:0", "cuda:1")
    places = {"rollout": Placement("rollout", cards, None, True, 0)}
    one = replace(record("rollout", items=8, seconds=2.0), cpu_s=10.0, devices=2)
    iteration = Iteration(2.5, (one,), places)
    program = Program.of([one], {"rollout": 1}, 2)
    known = workflow(program, [iteration], cards, cores=6).profile
    assert known.cores == 6
    assert known["rollout"].cores == pytest.approx(2.5), "busy cores for each device"
    assert workflow(program, [iteration], cards, cores=2).profile["rollout"].cores == 2
    plan = search(program.graph, known, cards, program.batch)
    assert plan.root.cores > 0, "it is given a share of them"
    places = {"rollout": Placement("rollout", CORES[:2], None, True, 0)}
    iteration = replace(iteration, placements=places)
    known = workflow(program, [iteration], CORES, cores=6).profile
    assert (known.cores, known["rollout"].cores) == (0, 0)


def test_what_no_stage_accounts_for_is_overhead() -> None:
    world = World({"rollout": 1.0, "trainer": 2.0}, {"rollout": 0.0, "trainer": 0.0})
    places = in_turn(("rollout", "trainer"), CORES[:1])
    iteration = world.run(places)
    known = workflow(
        Program.of(iteration.records, {"rollout": 1, "trainer": 1}, 1), [iteration], CORES
    )
    assert known.profile.sync_s == pytest.approx(0.01)


@pytest.mark.parametrize("how", ["temporal", "spatial"])
def test_a_plan_by_name_follows_one_iteration_of_looking(how: str) -> None:
    world = World({"rollout": 0.1, "trainer": 0.1}, {"rollout": 0.1, "trainer": 0.1})
    decisions = follow(world, how, 4)
    assert [plan.kind for plan in plans(decisions)] == [how]
    assert decisions[1].plan is not None and decisions[2].placements is None


def test_a_saved_plan_is_followed_from_the_start() -> None:
    world = World({"rollout": 0.1, "trainer": 0.1}, {"rollout": 0.1, "trainer": 0.1})
    [plan] = plans(follow(world, "spatial", 2))
    decisions = follow(world, plan, 3)
    assert decisions[0].placements == plan.placements()
    assert plans(decisions) == [plan]


def test_a_plan_for_other_groups_is_refused() -> None:
    world = World({"rollout": 0.1, "trainer": 0.1}, {"rollout": 0.1, "trainer": 0.1})
    [plan] = plans(follow(world, "temporal", 2))
    with pytest.raises(ConfigError, match=r"for the groups .*rollout.*has actor"):
        next(course(Choice.of(plan), PlanningConfig(), CORES, {"actor": 1}))


def test_no_such_plan() -> None:
    with pytest.raises(ConfigError, match="not temporal, spatial or auto"):
        Choice.of("sptial")


def test_auto_takes_turns_where_everybody_uses_all_devices_well() -> None:
    world = World({"rollout": 4.0, "trainer": 4.0}, {"rollout": 0.01, "trainer": 0.01})
    [plan] = plans(follow(world, "auto", 20))
    assert plan.kind == "temporal"
    assert plan.seconds == pytest.approx(2 * 4.32 / 4 + 0.01, rel=0.02)


def test_auto_works_side_by_side_where_more_devices_do_not_help() -> None:
    world = World({"rollout": 0.0, "trainer": 0.0}, {"rollout": 0.3, "trainer": 0.3}, scaling=0.05)
    world.streams = ("rollout",)
    [plan] = plans(follow(world, "auto", 20))
    assert plan.kind == "spatial"
    assert world.history[-1]["rollout"].chunk is None, "it streams, so it takes everything"
    assert world.history[-1]["trainer"].chunk is not None


def test_plans_that_come_close_are_tried_and_measured() -> None:
    world = World({"rollout": 0.0, "trainer": 0.0}, {"rollout": 0.3, "trainer": 0.3}, scaling=0.9)
    decisions = follow(world, "auto", 24, PlanningConfig(close=10.0))
    [final] = [decision for decision in decisions if decision.plan is not None]
    assert len(final.tried) >= 2
    assert final.plan == min(final.tried, key=lambda pair: pair[1])[0]


def drifting(at: int, rule: str) -> tuple[World, list[Decision]]:
    """The rollout gets eight times slower in mid-run."""
    world = World({"rollout": 0.0, "trainer": 1.0}, {"rollout": 0.1, "trainer": 0.3}, scaling=0.3)
    world.streams = ("rollout",)

    def change(number: int) -> None:
        if number == at:
            world.item_s["rollout"] *= 8

    config = PlanningConfig(rule=rule, window=4)  # type: ignore[arg-type]
    return world, follow(world, "auto", at + 24, config, change)


def test_a_lasting_drift_is_planned_for_once() -> None:
    _, decisions = drifting(24, "deviation")
    found = [n for n, decision in enumerate(decisions) if decision.plan is not None]
    assert len(found) == 2, [decisions[n].because for n in found]
    before, after = plans(decisions)
    assert before.placements() != after.placements()
    assert 24 < found[1] <= 24 + 4 + 3 + 1, "a window and a trial later"


def test_the_gain_rule_comes_to_the_same_plan() -> None:
    """It acts earlier, on a part of the change, and so perhaps more than once."""
    wanted = plans(drifting(24, "deviation")[1])[-1].placements()
    found = plans(drifting(24, "gain")[1])
    assert found[-1].placements() == wanted and len(found) <= 4


def test_nothing_is_planned_again_where_that_is_not_wanted() -> None:
    assert len(plans(drifting(24, "never")[1])) == 1


def test_a_new_plan_that_is_no_quicker_is_taken_back() -> None:
    world = World({"rollout": 0.0, "trainer": 1.0}, {"rollout": 0.1, "trainer": 0.3}, scaling=0.3)
    world.streams = ("rollout",)
    old: list[Mapping[str, Placement]] = []

    def change(number: int) -> None:
        if number == 24:
            old.append(world.history[-1])
            world.item_s["rollout"] *= 8
        if old and world.history[-1] != old[0]:
            world.call_s["trainer"] = 100.0

    decisions = follow(world, "auto", 44, PlanningConfig(window=4), change)
    before, after, *_ = plans(decisions)
    assert after == before
    assert any("no quicker" in decision.because for decision in decisions)


def test_nothing_flaps_where_the_times_are_noisy() -> None:
    world = World({"rollout": 0.0, "trainer": 1.0}, {"rollout": 0.1, "trainer": 0.3}, scaling=0.3)

    def change(number: int) -> None:
        world.item_s["rollout"] = 0.1 * (1.25 if number % 6 < 3 else 0.75)

    assert len(plans(follow(world, "auto", 80, PlanningConfig(rule="deviation"), change))) == 1


def test_placed_leaves_whole_components_whole() -> None:
    world = World({"rollout": 0.1, "trainer": 0.1}, {"rollout": 0.1, "trainer": 0.1})
    world.streams = ("rollout",)
    [plan] = plans(follow(world, "spatial", 2))
    program = Program(FlowGraph.chain("rollout", "trainer"), 32, frozenset({"rollout"}))
    places = placed(plan, program)
    assert places["rollout"].chunk is None and places["trainer"].chunk == 1


@pytest.mark.parametrize("how", ["temporal", "spatial", "auto"])
@pytest.mark.parametrize("cores", [(2, 2), (1, 3), (1, 1)])
def test_no_worker_is_to_span_two_nodes(how: str, cores: tuple[int, ...]) -> None:
    devices = tuple(f"n{node}/core:{k}" for node, n in enumerate(cores) for k in range(n))
    world = World({"rollout": 0.1, "trainer": 0.1}, {"rollout": 0.1, "trainer": 0.1})
    decisions = follow(world, how, 20, devices=devices)
    assert plans(decisions)
    for decision in decisions:
        for name, place in (decision.placements or {}).items():
            rank_places(name, 1, place, devices)


def test_groups_with_workers_on_every_node_have_all_devices() -> None:
    devices = ("a/core:0", "a/core:1", "b/core:0", "b/core:1")
    assert for_each_group(devices, (2, 4)) == devices
    assert for_each_group(devices, (2, 1)) == devices[:2]
    assert for_each_group((*devices, "b/core:2"), (2,)) == ("b/core:0", "b/core:1", "b/core:2")
    assert for_each_group(CORES, (1, 3)) == CORES


def test_in_turn_needs_no_lock_for_one_group() -> None:
    assert not in_turn(("only",), CORES)["only"].shared
    assert (
        temporal_plan(FlowGraph.chain("rollout", "trainer"), CORES, 4)
        .placements()["trainer"]
        .shared
    )

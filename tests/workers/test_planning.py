"""What records say about a program, and what is decided from it, in a made-up world."""

from dataclasses import replace

import pytest

from rlinf.sched import (
    ComponentProfile,
    FlowGraph,
    Leaf,
    Placement,
    Plan,
    Profile,
    Sample,
    Spatial,
    Temporal,
    Workflow,
    search,
    temporal_plan,
)
from rlinf.workers import ConfigError, PlanningConfig
from rlinf.workers.course import Choice, course
from rlinf.workers.devices import for_each_group, rank_places
from rlinf.workers.planning import (
    Iteration,
    Program,
    busy_s,
    foreseen_s,
    in_turn,
    placed,
    probes,
    workflow,
)
from tests.workers.planned import CHANNELS, CORES, World, follow, plans, record


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


def test_what_passing_on_and_the_next_take_cost_is_in_the_profile() -> None:
    """8 chunks of 4 items: 1 s of work, 0.1 s to commit, at least 0.05 s to be given the next."""
    places = {"trainer": Placement("trainer", CORES[:2], 4, True, 0)}
    one = record("trainer", items=4, seconds=1.0)
    chunks = [
        replace(one, start=2.0 * k, end=2.0 * k + 1.1, waited_s=0.0 if k == 0 else 0.05 + 0.1 * k)
        for k in range(8)
    ]
    chunks[5] = replace(chunks[5], waited_s=0.05)
    iteration = Iteration(9.5, tuple(chunks), places)
    assert busy_s("trainer", iteration) == pytest.approx(8.8)
    program = Program.of(chunks, {"trainer": 1}, 4)
    [entry] = workflow(program, [iteration], CORES).profile.components.values()
    assert entry.samples[0].seconds == pytest.approx(1.15)


def test_those_that_take_turns_load_and_free_once_an_iteration() -> None:
    """Also the first and the last one: the next iteration begins with the first again."""
    entries = {
        "rollout": ComponentProfile((Sample(1, 8, 2.0),), onload_s=0.1, offload_s=0.2),
        "trainer": ComponentProfile((Sample(1, 8, 3.0),), onload_s=0.3, offload_s=0.4),
    }
    graph = FlowGraph.chain("rollout", "trainer")
    known = Workflow(graph, Profile(entries, sync_s=0.5), CORES[:1], 8)
    turns = Temporal(Leaf("rollout", 1), Leaf("trainer", 1))
    searched = replace(turns, switch_s=0.5)  # freeing the one, loading the other
    for tree in (turns, searched):
        plan = Plan(tree, CORES[:1], 8)
        assert foreseen_s(known, plan) == pytest.approx(2 + 3 + 0.5 + 1.0)
    apart = Plan(Spatial(Leaf("rollout", 1), Leaf("trainer", 1), 1), CORES[:2], 8)
    assert foreseen_s(replace(known, devices=CORES[:2]), apart) == pytest.approx(5.5)


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

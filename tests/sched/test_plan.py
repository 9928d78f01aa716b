"""Plans are data: they say where components run, and survive a file."""

from pathlib import Path

import pytest

from rlinf.sched import (
    Component,
    FlowGraph,
    InfeasibleError,
    Leaf,
    Loop,
    Parallel,
    Plan,
    PlanError,
    Spatial,
    Temporal,
    spatial_plan,
    temporal_plan,
)

CORES = ("core:0", "core:1", "core:2", "core:3")
CHAIN = FlowGraph.chain("rollout", "score", "train")


def test_temporal_plan_puts_everybody_everywhere():
    plan = temporal_plan(CHAIN, CORES, 64)
    assert plan.kind == "temporal"
    placements = plan.placements()
    assert [p.position for p in placements.values()] == [0, 1, 2]
    for name in CHAIN.names:
        assert placements[name].devices == CORES
        assert placements[name].shared
        assert placements[name].chunk is None


def test_spatial_plan_gives_separate_devices_and_chunks():
    plan = spatial_plan(CHAIN, CORES, 64, 8)
    placements = plan.placements()
    assert plan.kind == "spatial"
    owned = [d for p in placements.values() for d in p.devices]
    assert len(owned) == len(set(owned)) == 4
    assert {p.chunk for p in placements.values()} == {8}
    assert not any(p.shared for p in placements.values())


def test_a_hybrid_shares_only_what_it_shares():
    root = Spatial(
        Temporal(Leaf("rollout", 3, micro_batches=1), Leaf("score", 2)), Leaf("train", 1), 4
    )
    plan = Plan(root, CORES, 10)
    places = plan.placements()
    assert plan.kind == "hybrid"
    assert places["rollout"].chunk is None and places["score"].chunk == 3
    assert places["rollout"].shared and places["score"].shared and not places["train"].shared
    assert places["train"].devices == ("core:3",)


def test_a_plan_survives_yaml_and_json(tmp_path: Path):
    root = Parallel(
        Loop((Leaf("simulator", 1), Leaf("policy", 2)), rounds=80, parts=2),
        Temporal(Leaf("a", 1), Leaf("b", 1), switch_s=1.5),
    )
    plan = Plan(root, 4, 7, seconds=12.5, staleness=1, bound=0.01)
    for name in ("plan.yaml", "plan.json"):
        plan.save(tmp_path / name)
        assert Plan.load(tmp_path / name) == plan
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "simulator: 1 device" in plan.tree()


def test_a_single_component_is_neither():
    assert temporal_plan(FlowGraph.chain("only"), 2, 1).kind == "single"


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"batch": 0}, "batch", "at least 1"),
        ({"batches": 3}, "batches", "did you mean 'batch'"),
        ({"devices": []}, "devices", "at least one device"),
        ({"tree": {"temporal": {"first": {"component": "a"}}}}, "tree.temporal", "second"),
        ({"tree": {"component": "a", "devices": "x"}}, "tree.devices", "number"),
        ({"tree": {"component": "a", "devices": 9}}, "a", "the plan has 1"),
        ({"format": "rlinf-plan/9"}, "format", "rlinf-plan/1"),
    ],
)
def test_a_wrong_document_names_path_and_reason(tmp_path: Path, change, path, reason):
    data = {"batch": 1, "devices": ["core:0"], "tree": {"component": "a", "devices": 1}} | change
    import yaml

    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.yaml")
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert caught.value.source.endswith("plan.yaml")


def test_infeasible_input_gives_the_arithmetic():
    graph = FlowGraph((Component("a", (2, 4)), Component("b", (2,))), (("a", "b"),))
    with pytest.raises(InfeasibleError, match=r"a 2 \+ b 2 = 4 devices, have 3"):
        spatial_plan(graph, 3, 8, 2)
    with pytest.raises(InfeasibleError, match="a needs 2 devices, have 1"):
        temporal_plan(graph, 1, 8)

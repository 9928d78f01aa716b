"""Memory, cores, device types, and long-tailed emission in the search."""

import pytest

from rlinf.sched import (
    Component,
    ComponentProfile,
    FlowGraph,
    InfeasibleError,
    Plan,
    Profile,
    Sample,
    Spatial,
    Temporal,
    Workflow,
    search,
)

GB = 1e9


def chain(*names: str, sizes: tuple[int, ...] = (1, 2, 4)) -> FlowGraph:
    return FlowGraph.chain(*(Component(name, sizes) for name in names))


def linear(seconds: float, **more: object) -> ComponentProfile:
    samples = tuple(Sample(n, 8, seconds / n) for n in (1, 2, 4))
    return ComponentProfile(samples, **more)


def test_what_fits_stays_and_saves_the_switch():
    def planned(memory: float) -> Plan:
        entry = {
            name: linear(4, active_bytes=40 * GB, resident_bytes=30 * GB, onload_s=1, offload_s=1)
            for name in ("a", "b")
        }
        return search(chain("a", "b", sizes=(1,)), Profile(entry, {"": memory}), 1, 8)

    roomy, narrow = planned(80 * GB), planned(60 * GB)
    assert isinstance(roomy.root, Temporal) and roomy.root.resident
    assert roomy.seconds == pytest.approx(8)
    assert isinstance(narrow.root, Temporal) and not narrow.root.resident
    assert narrow.seconds == pytest.approx(10)


def test_too_little_memory_is_infeasible_with_the_arithmetic():
    entry = {"a": linear(4, active_bytes=100 * GB)}
    with pytest.raises(InfeasibleError, match=r"a needs 1e\+11 bytes / 1 devices"):
        search(chain("a", sizes=(1,)), Profile(entry, {"": 80 * GB}), 1, 8)


def test_training_alone_in_memory_is_worth_a_switch():
    """ManiSkill's published times: 190.5 s alone, 474.1 s beside what stays resident."""
    simulator = ComponentProfile(
        (Sample(16, 512, 269.0),), resident_bytes=16 * 40 * GB, onload_s=5, offload_s=5
    )
    training = ComponentProfile(
        (Sample(16, 512, 190.5), Sample(16, 512, 474.1, free_bytes=40 * GB)), onload_s=5
    )
    graph = chain("simulator", "training", sizes=(16,))
    profile = Profile({"simulator": simulator, "training": training}, {"": 80 * GB})
    plan = search(graph, profile, 16, 512)
    assert isinstance(plan.root, Temporal) and not plan.root.resident
    assert plan.seconds == pytest.approx(269 + 10 + 190.5)


def test_a_bundle_for_one_node_is_infeasible_with_the_arithmetic():
    """S1: two devices on two nodes, and a component that needs two on one of them."""
    document = {
        "batch": 8,
        "devices": 2,
        "node_devices": 1,
        "components": {"a": {"sizes": [2], "node_local": True, "times": [[2, 8, 1.0]]}},
    }
    flow = Workflow.from_dict(document)
    with pytest.raises(InfeasibleError, match="a needs 2 devices on one node, a node has 1"):
        search(flow.graph, flow.profile, flow.devices, flow.batch)
    wide = Workflow.from_dict({**document, "node_devices": 2})
    assert search(wide.graph, wide.profile, wide.devices, wide.batch).seconds == 1.0


def test_cores_make_the_simulator_want_the_machine_alone():
    """LIBERO: side by side the simulator would get by with half of the cores."""
    graph = FlowGraph.chain(Component("simulator", (1, 2)), Component("training", (1, 2)))
    entries = {
        "simulator": linear(10, cores=32),
        "training": linear(10, cores=32),
    }
    free = search(graph, Profile(entries), 2, 8)
    bound = search(graph, Profile(entries, cores=32), 2, 8)
    assert bound.seconds >= free.seconds
    assert isinstance(bound.root, Temporal)


def test_a_mixed_machine_gives_each_its_type():
    def entry(fast: str) -> ComponentProfile:
        return ComponentProfile(
            tuple(
                Sample(n, 8, (4 if kind == fast else 40) / n, kind)
                for kind in ("h100", "l40")
                for n in (1, 2)
            )
        )

    graph = chain("rollout", "train", sizes=(1, 2))
    profile = Profile({"rollout": entry("l40"), "train": entry("h100")})
    devices = ("h100:0", "h100:1", "l40:0", "l40:1")
    plan = search(graph, profile, devices, 8)
    places = plan.placements()
    assert isinstance(plan.root, Spatial)
    assert places["rollout"].devices == ("l40:0", "l40:1")
    assert places["train"].devices == ("h100:0", "h100:1")


def test_a_long_tail_makes_pipelines_less_attractive():
    def planned(emission: tuple[float, ...]) -> Plan:
        entries = {
            "rollout": ComponentProfile(
                tuple(Sample(n, 64, 64 / n**0.5) for n in (1, 2, 4)), emission=emission
            ),
            "train": ComponentProfile(tuple(Sample(n, 64, 64 / n) for n in (1, 2, 4))),
        }
        return search(chain("rollout", "train"), Profile(entries), 4, 64)

    even, late = planned(()), planned((0.9, 0.95, 1.0))
    assert even.kind == "spatial"
    assert late.seconds > even.seconds


def test_a_type_that_a_component_was_not_measured_on_is_not_for_it():
    devices = ("h100:0", "l40:0", "l40:1")
    fast = ComponentProfile((Sample(1, 8, 1.0, "h100"),))
    anywhere = ComponentProfile((Sample(1, 8, 1.0),))
    graph = chain("rollout", "train", sizes=(1,))
    plan = search(graph, Profile({"rollout": fast, "train": anywhere}), devices, 8)
    assert plan.placements()["rollout"].devices == ("h100:0",)
    assert plan.kind == "spatial" and "l40:0" in plan.placements()["train"].devices
    slow = ComponentProfile((Sample(1, 8, 1.0, "l40"),))
    with pytest.raises(InfeasibleError, match="rollout was measured on h100 only, have 2 of l40"):
        search(graph, Profile({"rollout": fast, "train": slow}), devices[1:], 8)

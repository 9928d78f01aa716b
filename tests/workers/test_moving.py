"""Groups that move while the program runs: by hand, and as a planner says."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.sched import Placement, Plan
from rlinf.workers import (
    Cluster,
    Decision,
    FlowPlanner,
    InfeasiblePlacement,
    PlanningConfig,
    Worker,
    stage,
    wait_all,
)
from rlinf.workers.devices import local_cores
from rlinf.workers.testing import launch, placements, run_step, shared_ray

CORES = local_cores()
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core only")
FIRST, BOTH = CORES[:1], CORES[:2]


class Nomad(Worker):
    """Says where it is."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        torch.ones(512, 512) @ torch.ones(512, 512)  # starts the threads that compute

    def onload(self) -> None:
        self.moves.append("onload")

    def offload(self) -> None:
        self.moves.append("offload")

    def where(self) -> tuple[int, tuple[str, ...], int]:
        return torch.get_num_threads(), self.context.devices, self.context.incarnation

    def cores_of_threads(self) -> set[int]:
        """How many cores each thread of the process may use."""
        tasks = Path("/proc/self/task").iterdir()
        return {len(os.sched_getaffinity(int(task.name))) for task in tasks}

    def history(self) -> list[str]:
        return self.moves

    @stage
    def chunks(self, items: list[int]) -> int:
        return len(items)

    def die(self) -> None:
        if self.context.incarnation == 0:
            os._exit(1)


@pytest.fixture(scope="module", params=["inline", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "ray":
        shared_ray()
    with Cluster(launcher=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def nomad(cluster: Cluster) -> Any:
    return Nomad.group(cluster).launch()


def place(devices: tuple[str, ...], chunk: int | None = None, *, shared: bool = False) -> Placement:
    return Placement("nomad", devices, chunk, shared, 0)


def test_a_group_moves_between_its_calls(nomad: Any) -> None:
    assert nomad.where().result(60) == [(1, (), 0)]
    nomad.move(place(BOTH))
    assert nomad.where().result(30) == [(2, BOTH, 0)]
    nomad.move(place(FIRST))
    assert nomad.where().result(30) == [(1, FIRST, 0)]


def test_chunks_follow_the_placement(cluster: Cluster, nomad: Any) -> None:
    sizes = []
    for step, chunk in enumerate((None, 4), 1):
        nomad.move(place(FIRST, chunk))
        (items,) = cluster.channels(step, "items")
        items.put_many(list(range(10)))
        items.close()
        [[report]] = wait_all([nomad.chunks(items)], timeout=60)
        sizes.append(list(report.values))
    assert sizes == [[10], [4, 4, 2]]


def test_state_leaves_devices_that_are_shared_from_now_on(nomad: Any) -> None:
    before = len(nomad.history().result(30)[0])
    nomad.move(place(FIRST, shared=True))
    nomad.move(place(BOTH, shared=True))
    nomad.move(place(BOTH))
    assert nomad.history().result(30)[0][before:] == ["offload", "onload"]


def test_a_place_that_is_not_there_is_refused(nomad: Any) -> None:
    with pytest.raises(InfeasiblePlacement, match="core:999"):
        nomad.move(place(("core:999",)))


def test_every_thread_of_a_process_moves_and_a_restarted_one_starts_there() -> None:
    shared_ray()
    with Cluster(launcher="ray") as cluster:
        nomad: Any = Nomad.group(cluster).launch(place(BOTH))
        assert nomad.cores_of_threads().result(60) == [{2}]
        nomad.move(place(FIRST))
        assert nomad.cores_of_threads().result(30) == [{1}]
        nomad.die().result(60)
        assert nomad.where().result(60) == [(1, FIRST, 1)]


def run(plan: str | Plan, steps: int) -> tuple[list[Any], list[Decision]]:
    """Outcomes of the small program, planned while it runs."""
    decisions: list[Decision] = []
    with Cluster(launcher="inline") as cluster:
        groups = launch(cluster, {})
        planner = FlowPlanner(cluster, plan, PlanningConfig(tries=2), decisions.append)
        results = [
            run_step(cluster, groups, step)[-1].result
            for step in planner.steps(range(1, steps + 1))
        ]
    return results, decisions


def test_planning_does_not_change_the_outcome() -> None:
    with Cluster(launcher="inline") as cluster:
        groups = launch(cluster, placements("temporal", cluster.devices, 12))
        wanted = [run_step(cluster, groups, step)[-1].result for step in range(1, 16)]
    results, decisions = run("auto", 15)
    assert results == wanted
    plan = decisions[-1].plan
    assert plan is not None and plan.seconds is not None
    assert run(plan, 3)[0] == wanted[:3]


def test_decisions_are_carried_out_before_the_iteration() -> None:
    seen: list[Any] = []
    with Cluster(launcher="inline") as cluster:
        groups = launch(cluster, {})
        planner = FlowPlanner(cluster, "temporal", watch=lambda d: seen.append(d.because))
        for current in planner.steps(range(1, 4)):
            seen.append(current)
            run_step(cluster, groups, current)
    assert seen == ["to see what feeds what", 1, "as asked for", 2, 3]


def test_groups_with_a_placement_of_their_own_stay_where_they_are() -> None:
    with Cluster(launcher="inline") as cluster:
        own = placements("spatial", cluster.devices, 12)["learner"]
        groups = launch(cluster, {"learner": own})
        planner = FlowPlanner(cluster, "temporal")
        found = [run_step(cluster, groups, step) for step in planner.steps(range(1, 4))]
        learned = [record.items_in for record in found[-1][-1].records if record.items_in]
        assert learned == [3, 3, 3, 3]
    assert threading.active_count() < 20

"""Stages that feed one another: a walker and its guide, as a simulator and its policy do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rlinf.sched import Leaf, Loop, Plan, Temporal
from rlinf.workers import (
    Again,
    ChunkRecord,
    Cluster,
    ConfigError,
    Decision,
    FlowPlanner,
    PlanningConfig,
    StageError,
    Worker,
    stage,
    wait_all,
)
from rlinf.workers.devices import local_cores
from rlinf.workers.testing import misbehave, shared_ray, wait_until_gone

needs_two_cores = pytest.mark.skipif(len(local_cores()) < 2, reason="one core only")
ITEMS = 8


@dataclass(frozen=True, slots=True)
class Walk:
    """Where somebody is, how far to go, and what was seen on the way."""

    number: int
    left: int
    advice: int = 0
    seen: tuple[int, ...] = ()


class Walker(Worker):
    """The head: takes walks that begin, and those that come back with advice."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    @stage
    def walk(self, walks: list[Walk]) -> list[Any]:
        if self.fault and self.context.incarnation == 0 and walks[0].seen[1:]:
            misbehave(self.fault)
        moved = [replace(w, seen=(*w.seen, w.advice), left=w.left - 1) for w in walks]
        return [Again(walk) if walk.left else walk for walk in moved]

    @stage
    def stroll(self, walks: list[Walk]) -> Iterator[tuple[int, Walk]]:
        yield from enumerate(walks)


class Guide(Worker):
    """The other one."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    @stage
    def advise(self, walks: list[Walk]) -> list[Walk]:
        if self.fault and self.context.incarnation == 0 and walks[0].seen[1:]:
            misbehave(self.fault)
        return [replace(walk, advice=10 * walk.number + len(walk.seen)) for walk in walks]


class Taker(Worker):
    """Downstream of the ring; its total says how much was walked."""

    @stage
    def take(self, walks: list[Walk]) -> list[Walk]:
        return walks


def walks(step: int) -> list[Walk]:
    """Of different lengths, 1 to 5."""
    return [Walk(step * 100 + k, left=1 + k % 5) for k in range(ITEMS)]


def iterate(cluster: Cluster, groups: Any, step: int) -> list[tuple[int, tuple[int, ...]]]:
    """One iteration; (number, what was seen) of every walk."""
    walker, guide, taker = groups
    begun, ended = cluster.channels(step, "begun", "ended")
    ring = cluster.ring(step, "moved", "advised")
    begun.put_many(walks(step))
    begun.close()
    handles = [walker.walk(begun, ended, ring), guide.advise(*ring), taker.take(ended)]
    *_, [report] = wait_all(handles, timeout=60)
    return sorted((w.number, w.seen) for chunk in report.values for w in chunk)


def expected(step: int) -> list[tuple[int, tuple[int, ...]]]:
    """What one walker by himself would have seen."""
    return [
        (w.number, (0, *(10 * w.number + n for n in range(1, w.left))))
        for w in sorted(walks(step), key=lambda walk: walk.number)
    ]


def launch(cluster: Cluster, victim: str = "") -> Any:
    faults = {victim: "kill"}
    return (
        Walker.group(cluster, faults.get("walker", "")).launch(),
        Guide.group(cluster, faults.get("guide", "")).launch(),
        Taker.group(cluster).launch(),
    )


@pytest.fixture(scope="module")
def inline() -> Iterator[Cluster]:
    with Cluster(launcher="inline") as running:
        yield running


@pytest.fixture(scope="module")
def groups(inline: Cluster) -> Any:
    return launch(inline)


def test_everything_goes_round_until_it_leaves(inline: Cluster, groups: Any) -> None:
    for step in (1, 2):
        assert iterate(inline, groups, step) == expected(step)
    for channel in ("moved.1", "advised.1", "begun.1"):
        wait_until_gone(inline, channel)


def test_several_may_stand_beside_the_head(inline: Cluster) -> None:
    walker = Walker.group(inline, name="walker2").launch()
    guides = Guide.group(inline, count=2, name="guides").launch()
    taker = Taker.group(inline, name="taker2").launch()
    assert iterate(inline, (walker, guides, taker), 3) == expected(3)


def test_a_head_is_one_worker_and_has_an_output(inline: Cluster, groups: Any) -> None:
    (begun,) = inline.channels(4, "begun")
    with pytest.raises(ConfigError, match="needs an output channel"):
        groups[0].walk(begun, inline.ring(4, "moved", "advised"))


def test_a_head_returns_a_list(inline: Cluster, groups: Any) -> None:
    begun, ended = inline.channels(5, "begun", "ended")
    begun.put_many(walks(5))
    begun.close()
    ring = inline.ring(5, "moved", "advised")
    with pytest.raises(StageError, match="the head of a ring returns a list"):
        wait_all([groups[0].stroll(begun, ended, ring), groups[1].advise(*ring)], timeout=30)


def test_again_is_for_heads_only(inline: Cluster, groups: Any) -> None:
    begun, ended = inline.channels(6, "begun", "ended")
    begun.put_many(walks(6))
    begun.close()
    with pytest.raises(StageError, match="returned Again, but it is not"):
        groups[0].walk(begun, ended).result(30)


def test_a_fault_in_the_ring_ends_all_of_it(inline: Cluster, groups: Any) -> None:
    broken = Guide.group(inline, "raise", name="broken").launch()
    with pytest.raises(StageError, match=r"broken/0\.advise"):
        iterate(inline, (groups[0], broken, groups[2]), 7)
    assert iterate(inline, groups, 8) == expected(8)


@needs_two_cores
@pytest.mark.parametrize(("launcher", "parts"), [("inline", 1), ("inline", 2), ("ray", 2)])
def test_every_execution_gives_the_same(launcher: str, parts: int) -> None:
    """In turn on all cores, and in alternation on cores of their own."""
    if launcher == "ray":
        shared_ray()
    width = 2 if parts == 1 else 1
    loop = Loop((Leaf("walker", width), Leaf("guide", width)), rounds=5, parts=parts)
    plan = Plan(Temporal(loop, Leaf("taker", 2)), local_cores()[:2], batch=ITEMS)
    records: list[ChunkRecord] = []
    with Cluster(launcher=launcher, devices=local_cores()[:2]) as cluster:
        cluster.add_sink(records.append)
        groups = launch(cluster)
        for step in FlowPlanner(cluster, plan).steps((1, 2, 3)):
            assert iterate(cluster, groups, step) == expected(step)
    walked = [record for record in records if record.group == "walker" and record.iteration == 3]
    assert max(record.items_in for record in walked) == ITEMS // parts
    assert sum(record.items_in for record in walked) == sum(walk.left for walk in walks(3))


@needs_two_cores
@pytest.mark.parametrize("how", ["temporal", "spatial", "auto"])
def test_a_ring_is_planned_as_a_loop(how: str) -> None:
    decisions: list[Decision] = []
    with Cluster(launcher="inline", devices=local_cores()[:2]) as cluster:
        groups = launch(cluster)
        groups[2].managed = False  # two cores are too few for three side by side
        planner = FlowPlanner(cluster, how, PlanningConfig(tries=2), decisions.append)
        for step in planner.steps(range(1, 25)):
            assert iterate(cluster, groups, step) == expected(step)
    final = decisions[-1].plan
    assert final is not None and isinstance(final.root, Loop)
    assert {leaf.component for leaf in final.root.members} == {"walker", "guide"}
    if how != "auto":
        assert final.root.parts == (1 if how == "temporal" else 2)
    else:
        assert decisions[-1].workflow is not None
        assert final.root.rounds == 3, "the mean of 1 to 5, rounded"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["walker", "guide"])
def test_a_killed_member_is_replaced_in_mid_round(victim: str) -> None:
    """Without state neither loses anything; a new head learns from the server what is under way."""
    shared_ray()
    with Cluster(launcher="ray") as cluster:
        assert iterate(cluster, launch(cluster, victim), 1) == expected(1)

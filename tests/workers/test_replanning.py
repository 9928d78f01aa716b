"""When a program that drifts is planned again, in a made-up world."""

from collections.abc import Mapping
from dataclasses import replace

from rlinf.sched import Placement
from rlinf.workers import PlanningConfig
from rlinf.workers.course import Decision
from rlinf.workers.planning import Iteration
from tests.workers.planned import World, follow, plans


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


def test_a_square_wave_is_soon_no_longer_followed() -> None:
    world = World({"rollout": 0.0, "trainer": 1.0}, {"rollout": 0.1, "trainer": 0.3}, scaling=0.3)
    world.streams = ("rollout",)

    def change(number: int) -> None:
        world.item_s["rollout"] = 0.8 if number // 20 % 2 else 0.1

    made = plans(follow(world, "auto", 400, PlanningConfig(rule="deviation"), change))
    assert 2 <= len(made) <= 4, "20 edges, a window of 8, 16, then 32"


def test_what_did_nothing_while_its_plan_was_tried_may_work_later() -> None:
    world = World({"rollout": 0.1, "trainer": 1.0}, {"rollout": 0.1, "trainer": 0.3}, scaling=0.3)
    first = follow(world, "auto", 40)
    trial = [n for n, decision in enumerate(first) if "trying" in decision.because]
    world, run = World(world.call_s, world.item_s, scaling=0.3), world.run

    def idle(places: Mapping[str, Placement]) -> Iteration:
        iteration = run(places)
        if len(world.history) in trial:
            working = tuple(r for r in iteration.records if r.group != "rollout")
            iteration = replace(iteration, records=working)
        world.history.append(places)
        return iteration

    world.run = idle  # type: ignore[method-assign]
    decisions = follow(world, "auto", 40)
    assert [n for n, decision in enumerate(decisions) if "trying" in decision.because] == trial
    assert len(plans(decisions)) == 1


def test_a_plan_that_takes_longer_than_foreseen_is_no_drift() -> None:
    """Side by side stages slow each other down."""
    world = World({"rollout": 0.0, "trainer": 0.0}, {"rollout": 0.3, "trainer": 0.3}, scaling=0.05)
    world.streams, alone_s = ("rollout",), world.chunk_s

    def chunk_s(group: str, devices: int, items: int) -> float:
        apart = bool(world.history) and not world.history[-1]["trainer"].shared
        return alone_s(group, devices, items) * (1.3 if apart else 1.0)

    world.chunk_s = chunk_s  # type: ignore[method-assign]
    [plan] = plans(follow(world, "auto", 60))
    assert plan.kind == "spatial"

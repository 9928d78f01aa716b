"""Packings, and trials of limits: lower bounds, and the plans that reach them."""

import random
from dataclasses import replace

import pytest

from rlinf.sched import Component, FlowGraph, Profile, SearchConfig, search
from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.layout import Layout
from rlinf.sched.limits import raised
from rlinf.sched.machine import Machine
from rlinf.sched.packing import lower_bound, pack
from rlinf.sched.testing import Problem, every_plan, random_problem, run_micro_batches
from rlinf.sched.trial import Trial


def modelled(problem: Problem) -> CostModel:
    profile = problem.profile()
    machine = Machine.of(problem.devices, profile)
    return CostModel(problem.graph, profile, machine, problem.batch)


def best_of(problem: Problem) -> float:
    """The best of all plans; 0: there is none."""
    return min((run_micro_batches(problem, tree) for tree in every_plan(problem)), default=0.0)


def test_no_plan_beats_the_packing_or_the_raised_bound():
    rng = random.Random(4)
    gaps = []
    for components, devices, trials in ((2, 5, 20), (3, 4, 25), (4, 3, 8)):
        for _ in range(trials):
            problem = random_problem(rng, components, devices, rng.choice([0.2, 0.5, 0.8]))
            best = best_of(problem)
            model = modelled(problem)
            packing = pack(model, problem.micro_batches)
            if not best or packing is None:
                continue
            assert packing.seconds <= best * (1 + 1e-9)
            low = lower_bound(model, packing, problem.micro_batches)
            found = raised(model, packing, low, problem.micro_batches)
            assert low * (1 - 1e-6) <= found.seconds <= best * (1 + 1e-9)
            assert found.tree is not None
            seconds = evaluate(found.tree, model).seconds
            assert seconds == pytest.approx(run_micro_batches(problem, found.tree))
            assert found.seconds <= seconds * (1 + 1e-9)
            gaps.append(min(seconds, best) / found.seconds - 1)
    assert sorted(gaps)[len(gaps) // 2] < 0.02 and max(gaps) < 0.15


def test_merging_labels_keeps_the_bound():
    rng = random.Random(8)
    lowered = 0
    for _ in range(8):
        problem = random_problem(rng, 4, 3, rng.choice([0.3, 0.6]))
        best = best_of(problem)
        model = modelled(problem)
        packing = pack(model, problem.micro_batches)
        if not best or packing is None:
            continue
        layout = Layout.of(model, packing, problem.micro_batches)
        fine, coarse = (Trial(layout, best * 1.2, alike).least() for alike in (0, 800))
        assert 0.4 * best < coarse <= fine <= best * (1 + 1e-9)
        lowered += coarse < fine
    assert lowered > 1


def test_what_a_trial_has_shown_of_a_set_is_no_more_than_it_takes():
    """Limits ruled out one after another, against one trial that knows nothing."""
    rng = random.Random(9)
    for _ in range(8):
        problem = random_problem(rng, 4, 4, rng.choice([0.3, 0.6]))
        model = modelled(problem)
        packing = pack(model, problem.micro_batches)
        best = best_of(problem)
        if not best or packing is None:
            continue
        layout = Layout.of(model, packing, problem.micro_batches)
        least = Trial(layout, best * 1.1, 0).least()
        limit, found = packing.seconds * 1.003, float("inf")
        while found == float("inf"):
            trial = Trial(layout, limit, 25)
            found = trial.least()
            layout = replace(layout, spans=trial.spans())
            limit *= 1.03
        assert found <= least * 1.001


def test_a_limit_below_the_best_plan_is_ruled_out():
    graph = FlowGraph.chain(*(Component(n, (1,)) for n in "abc"))
    shares = {"a": 1, "b": 1, "c": 2}
    profile = Profile.from_laws({name: lambda n, b, s=s: s * b for name, s in shares.items()})
    model = CostModel(graph, profile, Machine.of(2, profile), 8)
    packing = pack(model)
    assert packing is not None
    best = search(graph, profile, 2, 8).seconds
    assert packing.seconds == pytest.approx(16.0) and best > 20
    layout = Layout.of(model, packing)
    assert Trial(layout, best * 0.999, 0).least() == float("inf")
    assert Trial(layout, best * 1.001, 0).least() == pytest.approx(best, rel=2e-3)


def test_no_plan_is_further_from_the_best_than_its_bound_says():
    """With narrow fronts, as for large workflows."""
    rng = random.Random(3)
    bounds = []
    for count in [3] * 40 + [4] * 10:
        problem = random_problem(rng, count, 7 - count, rng.choice([None, 0.3, 0.5, 0.8]))
        config = SearchConfig(micro_batches=problem.micro_batches, exact_components=1)
        plan = search(problem.graph, problem.profile(), problem.devices, problem.batch, config)
        assert plan.seconds <= best_of(problem) * (1 + plan.bound) * (1 + 1e-9), plan.tree()
        bounds.append(plan.bound)
    assert 0 < sorted(bounds)[len(bounds) // 2] < 0.02 and max(bounds) < 0.15


@pytest.mark.parametrize("edges", [6, 10])
def test_larger_workflows_are_planned_as_well_as_exactly(edges: int):
    """Against the exact search, which is no narrower for being slow."""
    rng = random.Random(edges)
    for _ in range(2):
        names = [f"c{i}" for i in range(5)]
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        graph = FlowGraph(
            tuple(Component(n, (1, 2, 4)) for n in names), tuple(rng.sample(pairs, edges))
        )
        work = {name: rng.uniform(5, 60) for name in names}
        profile = Profile.from_laws(
            {n: lambda k, b, w=w: 0.02 + w * b / k**0.8 for n, w in work.items()}
        )
        config = SearchConfig(micro_batches=(4, 16))
        exact = search(
            graph, profile, 8, 64, SearchConfig(micro_batches=(4, 16), exact_components=5)
        )
        plan = search(graph, profile, 8, 64, config)
        assert plan.seconds <= exact.seconds * (1 + plan.bound) * (1 + 1e-9)
        assert plan.bound < 0.05

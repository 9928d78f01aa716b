"""Packings, and what waiting adds to them: lower bounds, found without looking at plans."""

import random

import pytest

from rlinf.sched import Component, FlowGraph, Profile, SearchConfig, search
from rlinf.sched.cost import CostModel
from rlinf.sched.machine import Machine
from rlinf.sched.packing import pack
from rlinf.sched.segments import grains, prices
from rlinf.sched.testing import brute_force, random_problem
from rlinf.sched.waiting import raised_bound


@pytest.mark.parametrize("components", [2, 3, 4])
def test_no_plan_beats_the_packing(components: int):
    rng = random.Random(components)
    for _ in range(5):
        problem = random_problem(rng, components, 4 if components < 4 else 3, 0.5)
        profile = problem.profile()
        machine = Machine.of(problem.devices, profile)
        model = CostModel(problem.graph, profile, machine, problem.batch)
        packing = pack(model)
        assert packing is not None
        best, tree = brute_force(problem)
        assert tree is not None
        assert packing.seconds <= best * (1 + 1e-9)
        costs = prices(model, grains(model, tree))
        raised = raised_bound(model, packing, costs, packing.seconds, 2 * best).seconds
        assert packing.seconds <= raised <= best * (1 + 1e-9)


def test_no_plan_is_further_from_the_best_than_its_bound_says():
    """With narrow fronts, as for large workflows."""
    rng = random.Random(3)
    bounds = []
    for count in [3] * 40 + [4] * 10:
        problem = random_problem(rng, count, 7 - count, rng.choice([None, 0.3, 0.5, 0.8]))
        config = SearchConfig(micro_batches=problem.micro_batches, exact_components=1)
        plan = search(problem.graph, problem.profile(), problem.devices, problem.batch, config)
        best, _ = brute_force(problem)
        assert plan.seconds <= best * (1 + plan.bound) * (1 + 1e-9), plan.tree()
        bounds.append(plan.bound)
    assert max(bounds) > 0


def test_waiting_raises_the_bound_of_a_chain():
    """The packing has a and b in turn beside c, which would have to wait for b."""
    graph = FlowGraph.chain(*(Component(n, (1,)) for n in "abc"))
    shares = {"a": 1, "b": 1, "c": 2}
    profile = Profile.from_laws({name: lambda n, b, s=s: s * b for name, s in shares.items()})
    machine = Machine.of(2, profile)
    model = CostModel(graph, profile, machine, 8)
    packing = pack(model)
    assert packing is not None
    assert packing.seconds == pytest.approx(16.0)
    best = search(graph, profile, 2, 8)
    costs = prices(model, grains(model, best.root))
    raised = raised_bound(model, packing, costs, packing.seconds, best.seconds)
    assert 20.0 < raised.seconds <= best.seconds


def test_the_bound_charges_for_filling_a_pipeline_and_for_overheads():
    """Few micro-batches take long to fill it, many pay overheads often; a packing sees neither."""
    graph = FlowGraph.chain(*(Component(n, (1,)) for n in "abc"))
    profile = Profile.from_laws({name: lambda n, b: 0.5 + b for name in "abc"})
    model = CostModel(graph, profile, Machine.of(3, profile), 64)
    packing = pack(model)
    assert packing is not None
    best = search(graph, profile, 3, 64)
    told_apart = grains(model, best.root)
    low = packing.seconds
    knowing = raised_bound(model, packing, prices(model, told_apart), low, best.seconds)
    every = tuple(m for grain in told_apart for m in grain)
    mixed = raised_bound(model, packing, prices(model, (every,)), low, best.seconds)
    assert mixed.seconds < 0.9 * knowing.seconds < 0.9 * best.seconds
    assert best.seconds < 1.05 * knowing.seconds

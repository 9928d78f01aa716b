"""Packings: a lower bound on every plan, found without looking at plans."""

import random

import pytest

from rlinf.sched.cost import CostModel
from rlinf.sched.machine import Machine
from rlinf.sched.packing import pack
from rlinf.sched.testing import brute_force, random_problem


@pytest.mark.parametrize("components", [2, 3])
def test_no_plan_beats_the_packing(components: int):
    rng = random.Random(components)
    for _ in range(5):
        problem = random_problem(rng, components, 4, 0.5)
        profile = problem.profile()
        machine = Machine.of(problem.devices, profile)
        packing = pack(CostModel(problem.graph, profile, machine, problem.batch))
        assert packing is not None
        best, _ = brute_force(problem)
        assert packing.seconds <= best * (1 + 1e-9)

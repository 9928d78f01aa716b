"""Imitating an environment's script: does the policy do what it was shown?"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.workers.engines.imitation import ImitationConfig, collect_demonstrations, imitate
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.simulation.lane import EnvironmentLost
from rlinf.workers.engines.vla_policy import VlaSizes
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
import worlds

ADAM = OptimiserConfig(lr=5e-3, warmup_steps=5, beta2=0.99)
CONFIG = ImitationConfig(episodes=2, noise=0.2, updates=200, batch=16, optimiser=ADAM)
SPEC = EnvironmentSpec("worlds:guided", "")


def test_it_does_what_it_was_shown() -> None:
    sizes = VlaSizes(width=16, layers=1, heads=2, bins=5, chunk=2)
    policy = build_policy(PolicySpec("vla", vla=sizes), worlds.Guided.spaces)
    shown = collect_demonstrations(SPEC, CONFIG)
    assert [len(one.actions) for one in shown] == [8, 8]
    assert all(one.success for one in shown)
    before = imitate(policy, shown, 2, replace(CONFIG, updates=1), 0)
    after = imitate(policy, shown, 2, CONFIG, 0)
    assert before == pytest.approx(-np.log(5), abs=0.2)
    assert after > -0.5
    seen = {"state": torch.tensor([[0.9, 1.0], [-0.9, 1.0]])}
    first = policy.draw(seen, None)[1][:, 0, 0]
    assert first[0] < 0 < first[1], "it steers back"
    assert np.allclose(
        policy.state_mean,
        np.concatenate([s.observations["state"] for s in shown]).mean(0),
        atol=1e-5,
    )


def test_a_sharper_one_doubts_less_and_prefers_the_same() -> None:
    sizes = VlaSizes(width=16, layers=1, heads=2, bins=5, chunk=2)
    shown = collect_demonstrations(SPEC, CONFIG)
    found = []
    for factor in (1.0, 3.0):
        policy = build_policy(PolicySpec("vla", vla=sizes), worlds.Guided.spaces)
        imitate(policy, shown, 2, replace(CONFIG, updates=40, sharpen=factor), 0)
        state = torch.from_numpy(shown[0].observations["state"])
        found.append(policy({"state": state})[0].detach())
    assert torch.allclose(3 * found[0], found[1], atol=1e-4)


def test_demonstrations_that_fail_are_no_demonstrations() -> None:
    with pytest.raises(ConfigError, match="none of 2 demonstrations"):
        collect_demonstrations(replace(SPEC, options={"goal": 9.0}), CONFIG)
    with pytest.raises(ConfigError, match="none of 0 demonstrations"):
        collect_demonstrations(SPEC, replace(CONFIG, episodes=0))
    with pytest.raises(EnvironmentLost, match="has no script to learn from"):
        collect_demonstrations(EnvironmentSpec("worlds:steer", ""), CONFIG)

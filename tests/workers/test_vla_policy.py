"""A policy over pictures, words and a state, with chunks of action tokens."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.policy_trainer import PolicyTrainer, PolicyTrainerConfig
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.simulator import ProcessSimulator
from rlinf.workers.engines.vla_policy import VlaSizes
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.environments.libero import instruction_ids
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import CollectRequest, Field

sys.path.insert(0, str(Path(__file__).parent))
import worlds

SPEC = PolicySpec("vla", vla=VlaSizes(width=16, layers=1, heads=2, patch=8, bins=5, chunk=3))
SPACES = worlds.Painter.spaces


def shown(count, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 255, (count, 16, 16, 3)).astype(np.uint8),
        "state": rng.standard_normal((count, 1)).astype(np.float32),
        "instruction": np.tile(instruction_ids("paint it red"), (count, 1)),
    }


def scrambled():
    policy = build_policy(SPEC, SPACES)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    return policy


def test_what_is_drawn_is_what_is_evaluated():
    policy, seen = scrambled(), shown(7)
    noise = np.random.default_rng(1).random((7, 6), np.float32)
    decision = policy.actor().act(seen, noise)
    assert decision.choices.shape == decision.actions.shape == (7, 3, 2)
    found = policy.evaluate(
        {name: torch.from_numpy(array) for name, array in seen.items()},
        torch.from_numpy(decision.choices),
    )
    assert np.allclose(found.logprobs.detach(), decision.logprobs, atol=1e-5)
    assert (found.entropy > 0).all()
    values = policy.values({name: torch.from_numpy(array) for name, array in seen.items()})
    assert torch.allclose(values, found.values, atol=1e-6)


@pytest.mark.parametrize("name", ["image", "state", "instruction"])
def test_everything_that_is_shown_counts(name):
    policy, seen = scrambled(), shown(1)
    other = {**shown(1, seed=9), "instruction": instruction_ids("paint it blue")[None]}
    changed = {**seen, name: other[name]}
    logits, values = (
        [policy({n: torch.from_numpy(a) for n, a in one.items()})[i] for one in (seen, changed)]
        for i in range(2)
    )
    assert not torch.allclose(*logits)
    assert not torch.allclose(*values)


def test_tokens_are_what_actions_are_nearest_to():
    policy = build_policy(SPEC, SPACES)
    tokens = torch.arange(5).repeat(6)[: 5 * 6].view(5, 3, 2)
    actions = policy.actions(tokens)
    assert torch.equal(policy.tokens(actions + 0.1), tokens)
    assert actions.min() == -1 and actions.max() == 1


def test_words_keep_their_ids_and_padding_is_zero():
    first, second = instruction_ids("Pick up the soup"), instruction_ids("pick the bowl up.")
    assert first[0] == second[0] != 0
    assert (first[4:] == 0).all()
    assert len(instruction_ids("word " * 50)) == 16


def test_pictures_that_patches_do_not_fit_are_refused():
    spaces = replace(SPACES, observation={"image": Field((20, 20, 3), "uint8")})
    with pytest.raises(ConfigError, match="patch=8 does not divide"):
        build_policy(SPEC, spaces)
    with pytest.raises(ConfigError, match="needs an image or a state, not sound"):
        build_policy(SPEC, replace(SPACES, observation={"sound": Field((3,))}))
    with pytest.raises(ConfigError, match="needs a state vector"):
        build_policy(PolicySpec("mlp"), replace(SPACES, observation={"image": Field((8, 8, 3))}))


@pytest.mark.slow
def test_it_learns_from_pictures_in_chunks():
    policy = build_policy(SPEC, SPACES)
    config = PolicyTrainerConfig(gamma=0.5, epochs=4, minibatch=64)
    trainer = PolicyTrainer(policy, replace(config, optimiser=replace(config.optimiser, lr=3e-3)))
    settings = SimulatorConfig(environments=32, lanes=4, steps=4)
    spec = EnvironmentSpec("worlds:painter", "")
    simulator = ProcessSimulator(spec, settings, policy.actor(), SPACES)
    rewards = []
    for number in range(12):
        asked = [CollectRequest(number, lane, 4) for lane in range(4)]
        found = [one for _, one in simulator.collect(asked)]
        assert found[0].observations["image"].shape == (5, 8, 16, 16, 3)
        rewards.append(np.mean([one.rewards.mean() for one in found]))
        trainer.accumulate(found)
        trainer.finish_step()
    simulator.close()
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.5, rewards

"""Policies that learn from trajectories: numbers, invariances, and whether they learn at all."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.workers import Cluster, wait_all
from rlinf.workers.engines.mlp_actor import MlpSizes
from rlinf.workers.engines.mlp_policy import MlpPolicy, MlpStart
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.policy_trainer import PolicyTrainer, PolicyTrainerConfig
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.simulator import ProcessSimulator
from rlinf.workers.engines.trajectory_batch import episode_advantages, grid, stream_advantages
from rlinf.workers.engines.vla_policy import VlaSizes
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.roles.simulator import CollectRequest, Episode, Trajectory
from rlinf.workers.simulation_hosts import PolicyTrainerWorker, SimulatorWorker

sys.path.insert(0, str(Path(__file__).parent))
import worlds

SIZES = MlpSizes(1, (-1.0,), (1.0,), (16,))
ADAM = OptimiserConfig(lr=3e-3, warmup_steps=0, beta2=0.999, clip_norm=0.5)
CONFIG = PolicyTrainerConfig(optimiser=ADAM, gamma=0.5, epochs=4, minibatch=64)


def make_policy(spaces):
    return MlpPolicy(replace(SIZES, inputs=spaces.observation["state"].shape[0]), MlpStart(std=0.5))


def trajectory(steps=6, count=2, first=0, seed=0, **parts):
    """Of random numbers, with nothing ended."""
    rng = np.random.default_rng(seed)
    grid = (steps, count)
    blank = np.zeros(grid, bool)
    one = Trajectory(
        uid=f"0.{first}",
        environments=np.arange(first, first + count, dtype=np.int32),
        observations={"state": rng.standard_normal((steps + 1, count, 1)).astype(np.float32)},
        choices=rng.standard_normal((*grid, 1)).astype(np.float32),
        logprobs=-np.ones(grid, np.float32),
        rewards=rng.standard_normal(grid).astype(np.float32),
        terminated=blank,
        truncated=blank,
        valid=~blank,
        steps=np.ones(grid, np.int32),
        finals={"state": np.zeros((0, 1), np.float32)},
        ends=np.zeros((0, 2), np.int32),
        episodes=(),
        seeds=np.arange(count),
        version=0,
    )
    return replace(one, **parts)


def weights(trainer):
    return torch.cat([p.flatten() for p in trainer.state().values()])


@pytest.mark.parametrize("bins", [0, 5])
def test_the_actor_is_the_policy(bins):
    policy = MlpPolicy(MlpSizes(3, (-1.0, 0.0), (1.0, 2.0), (16, 16), bins), MlpStart(seed=3))
    actor = policy.actor()
    rng = np.random.default_rng(0)
    shown = rng.standard_normal((21, 3)).astype(np.float32)
    noise = rng.random((21, 2), np.float32)
    decision = actor.act({"state": shown}, noise)
    found = policy.evaluate(
        {"state": torch.from_numpy(shown)}, torch.from_numpy(np.asarray(decision.choices))
    )
    assert np.allclose(found.logprobs.detach(), decision.logprobs, atol=1e-5)
    assert decision.actions.shape == (21, 1, 2)
    alone = [actor.act({"state": shown[i : i + 1]}, noise[i : i + 1]) for i in range(21)]
    assert np.array_equal(np.concatenate([d.choices for d in alone]), decision.choices)
    assert np.array_equal(np.concatenate([d.logprobs for d in alone]), decision.logprobs)


def test_bins_are_drawn_as_often_as_their_probability_says():
    policy = MlpPolicy(MlpSizes(1, (-1.0,), (1.0,), (4,), 4))
    with torch.no_grad():
        last = policy.weights[8:28]  # 4 x 4 and 4, after 1 x 4 and 4
        last.zero_()[16:] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    noise = ((np.arange(1000) + 0.5) / 1000)[:, None].astype(np.float32)
    decision = policy.actor().act({"state": np.zeros((1000, 1))}, noise)
    counts = np.bincount(decision.choices[:, 0], minlength=4)
    assert np.abs(counts - [100, 200, 300, 400]).max() <= 1
    assert np.allclose(np.unique(decision.actions), [-1, -1 / 3, 1 / 3, 1])
    assert policy.actor().act({"state": np.zeros((1, 1))}, None).choices.tolist() == [[3]]


def test_truncation_bootstraps_from_what_was_last_seen_and_termination_does_not():
    one = trajectory(
        steps=3,
        observations={"state": np.full((4, 2, 1), 100, np.float32)},
        rewards=np.ones((3, 2), np.float32),
        terminated=np.array([[0, 0], [0, 1], [0, 0]], bool),
        truncated=np.array([[0, 0], [1, 0], [0, 0]], bool),
        finals={"state": np.array([[7], [9]], np.float32)},
        ends=np.array([[1, 0], [1, 1]], np.int32),
    )
    _, targets, _ = stream_advantages(grid([one]), lambda shown: shown["state"][:, 0], 0.5, 1.0)
    assert targets[1].tolist() == [1 + 0.5 * 7, 1]
    assert targets[0].tolist() == [1 + 0.5 * (1 + 0.5 * 7), 1 + 0.5 * 1]
    assert targets[2].tolist() == [1 + 0.5 * 100] * 2


def test_what_was_not_carried_out_is_not_learnt_from():
    whole = trajectory(steps=4)
    wide = {
        name: np.concatenate([getattr(whole, name), np.full_like(getattr(whole, name)[:1], fill)])
        for name, fill in (
            *(("choices", 3), ("logprobs", -9), ("rewards", 0), ("steps", 0)),
            *(("terminated", False), ("truncated", False), ("valid", False)),
        )
    }
    shown = np.concatenate([whole.observations["state"], np.full((1, 2, 1), 77, np.float32)])
    cut = np.zeros((5, 2), bool)
    cut[3] = True
    ends = {
        "truncated": cut,
        "ends": np.array([[3, 0], [3, 1]], np.int32),
        "finals": {"state": shown[4].copy()},
    }
    longer = replace(whole, observations={"state": shown}, **(wide | ends))
    shorter = replace(whole, **(ends | {"truncated": cut[:4]}))
    found = []
    for one in (shorter, longer):
        trainer = PolicyTrainer(make_policy(worlds.Steer.spaces), CONFIG)
        trainer.accumulate([one])
        assert trainer.finish_step().decisions == 8
        found.append(weights(trainer))
    assert torch.allclose(*found, atol=1e-7)


def test_the_order_in_which_lanes_arrive_does_not_matter():
    lanes = [trajectory(first=0, seed=1), trajectory(first=2, seed=2)]
    found = []
    for calls in ([lanes], [[lanes[1]], [lanes[0]]]):
        trainer = PolicyTrainer(make_policy(worlds.Steer.spaces), CONFIG)
        for call in calls:
            trainer.accumulate(call)
        trainer.finish_step()
        found.append(weights(trainer))
    assert torch.equal(*found)


def test_a_restored_trainer_goes_on_as_if_nothing_had_been():
    first, second = (trajectory(seed=seed) for seed in (1, 2))
    ended = (Episode(0, 1, 5.0, 3, True), Episode(1, 1, 9.0, 3, False, lost=True))
    one = PolicyTrainer(make_policy(worlds.Steer.spaces), CONFIG)
    one.accumulate([replace(first, episodes=ended)])
    with pytest.raises(ValueError, match="finish the step"):
        one.save()
    stats = one.finish_step()
    assert (stats.reward, stats.success, stats.episodes, stats.lost) == (5, 1, 1, 1)
    tensors, numbers = one.save()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    other = PolicyTrainer(make_policy(worlds.Steer.spaces), CONFIG)
    other.restore(tensors, numbers)
    for trainer in (one, other):
        trainer.accumulate([second])
        stats = trainer.finish_step()
        assert (stats.version, stats.reward) == (2, 5)
    assert torch.equal(weights(one), weights(other))


def test_grpo_compares_the_episodes_that_began_alike():
    seeds = np.array([7, 7, 8, 8, 9, 9, 9])
    rewards = np.array([[1, 3, 5, 5, 1, 2, 50]], np.float32)
    lost = (Episode(6, 9, 50, 1, False, lost=True), Episode(1, 7, 3, 1, True))
    one = trajectory(1, 7, seeds=seeds, rewards=rewards, episodes=lost)
    [found] = episode_advantages(grid([one]), by_success=False).tolist()
    assert found[2:4] == [0, 0], "equal ones teach nothing"
    assert found[0] == -found[1] < 0
    assert (found[4], found[6]) == (-found[5], 0), "a lost one is no member"
    [won] = episode_advantages(grid([one]), by_success=True).tolist()
    assert won[0] == -won[1] < 0
    assert won[2:] == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_it_learns_to_steer(advantage):
    policy = make_policy(worlds.Steer.spaces)
    config = replace(CONFIG, advantage=advantage)
    actor, trainer = policy.actor(), PolicyTrainer(policy, config)
    settings = SimulatorConfig(environments=32, lanes=2, steps=8)
    spec = EnvironmentSpec("worlds:steer", "")
    simulator = ProcessSimulator(spec, settings, actor, worlds.Steer.spaces)
    rewards = []
    for number in range(30):
        actor.load(policy.actor().weights())
        seeds = tuple(100 * number + i // 8 for i in range(16)) if advantage == "grpo" else ()
        asked = [CollectRequest(number, lane, 8, seeds) for lane in range(2)]
        found = [one for _, one in simulator.collect(asked)]
        rewards.append(np.mean([one.rewards.mean() for one in found]))
        trainer.accumulate(found)
        trainer.finish_step()
    simulator.close()
    assert np.mean(rewards[:3]) < -0.4
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) / 2, rewards


@pytest.mark.parametrize("codec", ["", "patches"])
def test_pictures_arrive_as_they_were(codec):
    spec = EnvironmentSpec("worlds:painter", "")
    settings = SimulatorConfig(environments=2, lanes=1, steps=4, codec=codec)
    policy = PolicySpec("vla", vla=VlaSizes(width=16, layers=1, heads=2, patch=8))
    make = partial(build_policy, policy)
    with Cluster(launcher="inline") as cluster:
        simulator = SimulatorWorker.group(
            cluster, spec, settings, make, "nobody/0", worlds.Painter.spaces, name="simulator"
        ).launch()
        requests, trajectories = cluster.channels(1, "requests", "trajectories")
        requests.put(CollectRequest(0, 0, 4))
        requests.close()
        wait_all([simulator.collect(requests, trajectories)])
        [one] = list(trajectories)
        trajectories.delete()
    pictures = one.observations["image"]
    assert (pictures.shape, pictures.dtype) == ((5, 2, 16, 16, 3), np.uint8)
    assert set(np.unique(pictures)) <= {30, 220}


def test_the_workers_around_them():
    spec = EnvironmentSpec("worlds:steer", "")
    settings = SimulatorConfig(environments=4, lanes=2, steps=8)
    with Cluster(launcher="inline") as cluster:
        spaces = worlds.Steer.spaces
        trainer = PolicyTrainerWorker.group(
            cluster, spaces, CONFIG, make_policy, name="trainer"
        ).launch()
        simulator = SimulatorWorker.group(
            cluster, spec, settings, make_policy, "trainer/0", name="simulator"
        ).launch()
        versions = []
        for step in range(3):
            [version] = trainer.publish().result(60)
            simulator.load_weights(version).result(60)
            requests, trajectories = cluster.channels(step, "requests", "trajectories")
            requests.put_many([CollectRequest(step, lane, 8) for lane in range(2)])
            requests.close()
            handles = [simulator.collect(requests, trajectories), trainer.train(trajectories)]
            [collected], [report] = wait_all(handles)
            versions.append(report.result.version)
            assert report.result.steps == 32
            assert sum(record.tokens for record in collected.records) == 32
        assert versions == [1, 2, 3]
        assert simulator.lanes().result(60) == [[2, 2]]
        assert simulator.statistics().result(60)[0].episodes == 12

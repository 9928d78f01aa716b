"""The environments that plug-ins bring, as far as they are installed here."""

import importlib.util

import numpy as np
import pytest
import torch

from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.lane import demonstrate, film, find_spaces
from rlinf.workers.engines.simulation.simulator import ProcessSimulator
from rlinf.workers.environments import EnvironmentSpec, make_batch, make_environment
from rlinf.workers.environments.maniskill import ManiSkillBatch, make, together
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import CollectRequest


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f'pip install "rlinf-workers[{extra}]"')


LIBERO = EnvironmentSpec(
    "libero", "libero_object", {"limit": 240, "starts": 2}, {"MUJOCO_GL": "osmesa"}
)


def collected(spec, steps, count=2, policy=None):
    spaces = find_spaces(spec, 300)
    actor = build_policy(policy or PolicySpec(), spaces).actor()
    settings = SimulatorConfig(environments=count, lanes=2, steps=steps)
    simulator = ProcessSimulator(spec, settings, actor, spaces)
    try:
        return dict(simulator.collect([CollectRequest(0, lane, steps) for lane in range(2)]))
    finally:
        simulator.close()


@needs("mujoco", "mujoco")
def test_gymnasium_begins_the_same_episode_for_the_same_seed() -> None:
    world = make_environment(EnvironmentSpec("gymnasium", "InvertedPendulum-v5"))
    assert (world.spaces.low, world.spaces.high) == ((-3.0,), (3.0,))
    action = np.zeros(1, np.float32)
    first = world.reset(7)["state"].copy()
    after = world.step(action)
    assert after.observation["state"].shape == (4,)
    assert (after.reward, after.terminated, after.truncated) == (1.0, False, False)
    assert np.array_equal(world.reset(7)["state"], first)
    assert not np.array_equal(world.reset(8)["state"], first)
    world.close()


@needs("gymnasium", "mujoco")
def test_gymnasium_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="only boxes are supported"):
        make_environment(EnvironmentSpec("gymnasium", "CartPole-v1"))
    with pytest.raises(ConfigError, match="gymnasium cannot make Nowhere-v1"):
        make_environment(EnvironmentSpec("gymnasium", "Nowhere-v1"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("mani_skill", "maniskill")
def test_maniskill_runs_without_a_renderer() -> None:
    found = collected(EnvironmentSpec("maniskill", "MS-CartpoleBalance-v1"), 32, count=4)
    for one in found.values():
        assert one.valid.all()
        assert np.isfinite(one.observations["state"]).all()
        assert (one.rewards >= 0).all() and one.rewards.sum() > 0


class FakeDevice:
    """ManiSkill's vector environment as far as it is used: with its one stream of beginnings."""

    device = torch.device("cpu")

    def __init__(self, count: int) -> None:
        self.state, self.told = torch.zeros(count, 2), []

    def reset(self, seed, options):
        assert len(seed) == len(self.state), "ManiSkill takes a seed for each, or mixes them up"
        torch.manual_seed(seed[0])
        places = options["env_idx"]
        self.state[places] = torch.rand(len(places), 2)
        return self.state, {}

    def step(self, actions):
        self.state = self.state + actions
        ended = self.state[:, 0] > 1
        info = {"success": self.state[:, 0] > 2}
        return self.state, self.state.sum(1), ended, torch.zeros_like(ended), info


def test_a_partial_reset_on_the_device_begins_new_episodes_there_only() -> None:
    batch = ManiSkillBatch(FakeDevice(3), 3)
    first = batch.reset(np.arange(3), np.array([5, 6, 7]))["state"].copy()
    second = batch.reset(np.array([2]), np.array([8]))["state"].copy()
    third = batch.reset(np.array([2]), np.array([9]))["state"].copy()
    assert np.array_equal(first[:2], third[:2])
    assert not np.array_equal(second[2], first[2])
    assert not np.array_equal(third[2], second[2]), "its beginning is its own seed's"
    assert np.array_equal(batch.reset(np.array([2]), np.array([8]))["state"], second)
    outcome = batch.step(np.full((3, 2), [[0], [1], [2.5]], np.float32))
    assert outcome.terminated.tolist() == [False, True, True]
    assert (outcome.success.tolist(), outcome.rewards.dtype) == ([False, False, True], np.float32)
    assert outcome.observation["state"].shape == (3, 2)


@pytest.mark.parametrize(
    ("options", "vulkan", "cuda", "expected"),
    [
        ({}, True, True, True),
        ({}, True, False, False),
        ({}, False, True, False),
        ({"sim_backend": "physx_cpu"}, True, True, False),
        ({"sim_backend": "physx_cuda"}, True, True, True),
    ],
)
def test_environments_are_together_where_there_is_a_device(options, vulkan, cuda, expected) -> None:
    assert together(options, vulkan, cuda) is expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # ManiSkill's, on the CPU
@needs("mani_skill", "maniskill")
def test_a_batch_of_maniskill_is_what_a_single_one_is() -> None:
    """The same code as on a device, around one world on the CPU: it takes no more of them."""
    id = "MS-CartpoleBalance-v1"
    single, other = make(id), make(id)
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    batch = ManiSkillBatch(ManiSkillVectorEnv(other._world, auto_reset=False), 1)
    for seed in (3, 4):
        shown = single.reset(seed)["state"]
        assert np.array_equal(batch.reset(np.array([0]), np.array([seed]))["state"][0], shown)
        for push in np.linspace(-1, 1, 20, dtype=np.float32):
            one = single.step(np.array([push]))
            many = batch.step(np.array([[push]]))
            assert np.array_equal(many.observation["state"][0], one.observation["state"])
            facts = (many.rewards, many.terminated, many.truncated, many.success)
            assert [x[0] for x in facts] == [
                np.float32(one.reward),
                *(one.terminated, one.truncated, one.success),
            ]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@needs("mani_skill", "maniskill")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_maniskill_simulates_together_on_the_device() -> None:
    spec = EnvironmentSpec("maniskill", "MS-CartpoleBalance-v1")
    batch = make_batch(spec, 64)
    if batch is None:
        pytest.skip("there is no Vulkan device")
    seeds = np.arange(64)
    first = batch.reset(np.arange(64), seeds)["state"].copy()
    assert len(np.unique(first, axis=0)) == 64
    assert np.array_equal(batch.reset(np.arange(64), seeds)["state"], first)
    del batch
    for one in collected(spec, 32, count=64).values():
        assert one.valid.all()
        assert np.isfinite(one.observations["state"]).all()
        assert one.rewards.sum() > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("libero", "libero")
def test_libero_shows_pictures_and_an_instruction_and_its_script_succeeds() -> None:
    policy = PolicySpec("vla")
    found = collected(LIBERO, 2, policy=policy)
    for one in found.values():
        assert one.observations["image"].shape == (3, 1, 64, 64, 3)
        assert one.observations["image"].std() > 10
        assert one.observations["instruction"][0, 0, 0] > 0
        assert (one.steps == 4).all()
    [shown] = demonstrate(LIBERO, [0], 240, 0.0, 600)
    assert shown.success and len(shown.actions) < 200
    actor = build_policy(policy, find_spaces(LIBERO, 300)).actor()
    assert len(film(LIBERO, actor, 0, 5, 300)) >= 5

"""The environments that plug-ins bring, as far as they are installed here."""

import importlib.util

import numpy as np
import pytest

from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.lane import demonstrate, film, find_spaces
from rlinf.workers.engines.simulation.simulator import ProcessSimulator
from rlinf.workers.environments import EnvironmentSpec, make_environment
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

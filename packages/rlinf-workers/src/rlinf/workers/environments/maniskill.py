"""ManiSkill's tasks, states as observations: `pip install rlinf-workers[maniskill]`.

Simulates on the CPU, one world a `gym.make`. Where there is no Vulkan device the materials of
pictures cannot be made, although nothing is drawn: stand-ins take their place before a task is
made. With a device nothing is replaced, and `render` draws.
"""

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf.workers.environments import RenderingUnavailable
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import (
    Environment,
    Field,
    FloatArray,
    Observation,
    Outcome,
    Spaces,
)

__all__ = ["ManiSkillEnvironment", "make"]

HINT = 'pip install "rlinf-workers[maniskill]"'
MATERIALS = ("RenderMaterial", "RenderTexture2D")


def make(id: str, **options: Any) -> Environment:
    """The task `id`; `options` go to `gymnasium.make`. Raises `ConfigError` without ManiSkill."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sapien, which looks for Vulkan, and of old interfaces
        try:
            can_render = _prepare()
            import gymnasium
            import mani_skill.envs  # noqa: F401 - registers the tasks
        except ImportError as error:
            raise ConfigError(f"environment {id} needs ManiSkill ({error}): {HINT}") from error
        import torch

        threads = torch.get_num_threads()
        settings = {"obs_mode": "state", "sim_backend": "physx_cpu", "num_envs": 1}
        drawing = {"render_mode": "rgb_array"} if can_render else {"render_backend": "none"}
        try:
            world = gymnasium.make(id, **{**settings, **drawing, **options})
        except gymnasium.error.Error as error:
            raise ConfigError(f"ManiSkill cannot make {id}: {error}") from error
        torch.set_num_threads(threads)
    return ManiSkillEnvironment(world, can_render)


def _prepare() -> bool:
    """Whether pictures can be drawn; where not, put stand-ins in the place of materials."""
    import sapien.pysapien
    import sapien.render
    import sapien.wrapper.urdf_loader

    places: tuple[Any, ...] = (sapien.pysapien.render, sapien.render, sapien.wrapper.urdf_loader)
    try:
        sapien.pysapien.render.RenderMaterial()
    except RuntimeError:
        for place in places:
            for name in MATERIALS:
                setattr(place, name, type(name, (_NoMaterial,), {}))
        for name in MATERIALS:  # the same class everywhere: it is looked at with isinstance
            kind = getattr(places[0], name)
            for place in places:
                setattr(place, name, kind)
        return False
    return not issubclass(sapien.pysapien.render.RenderMaterial, _NoMaterial)


class _NoMaterial:
    """Takes whatever a material takes and draws nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class ManiSkillEnvironment:
    """One task; its batch of one is taken off."""

    def __init__(self, world: Any, can_render: bool) -> None:
        self._world, self._can_render = world, can_render
        action = world.action_space
        self._state = np.zeros(world.observation_space.shape[-1], np.float32)
        self.spaces = Spaces(
            observation={"state": Field(self._state.shape)},
            low=tuple(map(float, action.low.ravel())),
            high=tuple(map(float, action.high.ravel())),
        )

    def reset(self, seed: int) -> Observation:
        """See `Environment`."""
        return self._shown(self._world.reset(seed=seed)[0])

    def step(self, action: FloatArray) -> Outcome:
        """See `Environment`."""
        shown, reward, terminated, truncated, info = self._world.step(action)
        success = bool(info["success"]) if "success" in info else False
        return Outcome(
            self._shown(shown), float(reward), bool(terminated), bool(truncated), success
        )

    def render(self) -> npt.NDArray[np.uint8]:
        """See `Environment`; needs a Vulkan device."""
        if not self._can_render:
            raise RenderingUnavailable("ManiSkill draws on a Vulkan device, and there is none")
        return np.asarray(self._world.render()[0].cpu(), np.uint8)

    def close(self) -> None:
        """See `Environment`."""
        self._world.close()

    def _shown(self, batch: Any) -> Observation:
        self._state[:] = batch[0]
        return {"state": self._state}

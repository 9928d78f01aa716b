"""ManiSkill's tasks, states as observations: `pip install rlinf-workers[maniskill]`.

Where there are a Vulkan and a CUDA device all environments of a process are simulated together on
it, by ManiSkill's own vector environment; `sim_backend: physx_cpu` among the options forbids that.
Elsewhere it simulates on the CPU, one world a `gym.make`. Without a Vulkan device the materials of
pictures cannot be made, although nothing is drawn: stand-ins take their place before a task is
made. With a device nothing is replaced, and `render` draws.

On the device an episode depends on its seed and on which others began with it: tasks draw their
beginnings from one stream for all of them.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf.workers.environments import RenderingUnavailable
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import (
    BatchOutcome,
    Environment,
    EnvironmentBatch,
    Field,
    FloatArray,
    Observation,
    Outcome,
    Spaces,
)

__all__ = ["ManiSkillBatch", "ManiSkillEnvironment", "make", "make_batch", "together"]

HINT = 'pip install "rlinf-workers[maniskill]"'
MATERIALS = ("RenderMaterial", "RenderTexture2D")


def make(id: str, **options: Any) -> Environment:
    """The task `id`; `options` go to `gymnasium.make`. Raises `ConfigError` without ManiSkill."""
    can_render = _prepared(id)
    drawing = {"render_mode": "rgb_array"} if can_render else {"render_backend": "none"}
    settings = {"obs_mode": "state", "sim_backend": "physx_cpu", "num_envs": 1}
    return ManiSkillEnvironment(_made(id, {**settings, **drawing, **options}), can_render)


def make_batch(id: str, count: int, **options: Any) -> EnvironmentBatch | None:
    """So many of the task on the device; None: there is none. Raises as `make` does."""
    import torch

    can_render = _prepared(id)
    if not together(options, can_render, torch.cuda.is_available()):
        return None
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    # Worlds that are made anew could not be reset one by one.
    settings = {"obs_mode": "state", "sim_backend": "physx_cuda", "reconfiguration_freq": 0}
    world = _made(id, {**settings, **options, "num_envs": count})
    return ManiSkillBatch(ManiSkillVectorEnv(world, auto_reset=False), count)


def together(options: Mapping[str, Any], can_render: bool, has_cuda: bool) -> bool:
    """Whether environments are simulated together. Asked before any is made: PhysX is on the CPU
    or on the device for all of a process."""
    asked = str(options.get("sim_backend", "auto"))
    return can_render and has_cuda and asked not in ("cpu", "physx_cpu")


def _prepared(id: str) -> bool:
    """Whether pictures can be drawn; see `_prepare`."""
    with _quiet():
        try:
            return _prepare()
        except ImportError as error:
            raise ConfigError(f"environment {id} needs ManiSkill ({error}): {HINT}") from error


def _made(id: str, settings: dict[str, Any]) -> Any:
    with _quiet():
        import gymnasium
        import mani_skill.envs  # noqa: F401 - registers the tasks
        import torch

        threads = torch.get_num_threads()
        try:
            return gymnasium.make(id, **settings)
        except gymnasium.error.Error as error:
            raise ConfigError(f"ManiSkill cannot make {id}: {error}") from error
        finally:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of sapien, which looks for Vulkan, and of old interfaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


class ManiSkillBatch:
    """An `EnvironmentBatch` of `count`; what crosses to the host is one array a quantity and step.

    Args:
        world: A `ManiSkillVectorEnv` that does not reset by itself.
        count: How many are in it.
    """

    def __init__(self, world: Any, count: int) -> None:
        self._world = world
        self._seeds = np.zeros(count, np.int64)

    def reset(self, indexes: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64]) -> Observation:
        """See `EnvironmentBatch`."""
        import torch

        self._seeds[indexes] = seeds
        given = self._seeds.copy()
        # The first one seeds the stream that all beginnings are drawn from: if it were that of an
        # environment which goes on, every episode would begin alike.
        given[0] = seeds[0]
        places = torch.as_tensor(indexes, device=self._world.device)
        shown, _ = self._world.reset(seed=given.tolist(), options={"env_idx": places})
        return {"state": shown.cpu().numpy()}

    def step(self, actions: FloatArray) -> BatchOutcome:
        """See `EnvironmentBatch`."""
        import torch

        moved = torch.from_numpy(actions.copy()).to(self._world.device)
        shown, rewards, terminated, truncated, info = self._world.step(moved)
        success = info["success"] if "success" in info else torch.zeros_like(terminated)
        return BatchOutcome(
            {"state": shown.cpu().numpy()},
            *(t.cpu().numpy() for t in (rewards, terminated, truncated, success.bool())),
        )

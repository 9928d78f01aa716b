"""Gymnasium's environments with continuous actions: `pip install rlinf-workers[mujoco]`."""

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

__all__ = ["GymnasiumEnvironment", "make"]

HINT = 'pip install "rlinf-workers[mujoco]"'


def make(id: str, **options: Any) -> Environment:
    """`gymnasium.make(id, **options)`. Raises `ConfigError` where it is not installed."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"environment {id} needs gymnasium ({error}): {HINT}") from error
    try:
        world = gymnasium.make(id, **options)
    except gymnasium.error.Error as error:
        raise ConfigError(f"gymnasium cannot make {id}: {error}; {HINT}") from error
    return GymnasiumEnvironment(world, id)


class GymnasiumEnvironment:
    """Observations that are one vector become `state`, pictures `image`."""

    def __init__(self, world: Any, id: str) -> None:
        import gymnasium

        shown, taken = world.observation_space, world.action_space
        boxes = isinstance(shown, gymnasium.spaces.Box) and isinstance(taken, gymnasium.spaces.Box)
        if not boxes:
            raise ConfigError(f"{id} shows {shown} and takes {taken}: only boxes are supported")
        self._name = "image" if len(shown.shape) == 3 else "state"
        self._dtype = "uint8" if self._name == "image" else "float32"
        self._world, self._id = world, id
        self.spaces = Spaces(
            observation={self._name: Field(tuple(shown.shape), self._dtype)},
            low=tuple(map(float, taken.low.ravel())),
            high=tuple(map(float, taken.high.ravel())),
        )

    def reset(self, seed: int) -> Observation:
        """See `Environment`."""
        return {self._name: self._world.reset(seed=seed)[0]}

    def step(self, action: FloatArray) -> Outcome:
        """See `Environment`; `info["success"]` or `info["is_success"]` is the success."""
        shown, reward, terminated, truncated, info = self._world.step(action)
        success = bool(info.get("success", info.get("is_success", False)))
        return Outcome(
            {self._name: shown}, float(reward), bool(terminated), bool(truncated), success
        )

    def render(self) -> npt.NDArray[np.uint8]:
        """See `Environment`; needs `render_mode: rgb_array` among the options."""
        if self._world.render_mode != "rgb_array":
            raise RenderingUnavailable(f"{self._id} was made without render_mode=rgb_array")
        return np.asarray(self._world.render(), np.uint8)

    def close(self) -> None:
        """See `Environment`."""
        self._world.close()

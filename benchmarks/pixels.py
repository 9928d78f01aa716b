"""A light environment with pictures, for the benchmark of vectors: a square that bounces."""

import gymnasium
import numpy as np

SIZE, EDGE = 64, 8


class Bounce(gymnasium.Env):
    """64x64 RGB; an episode has 200 steps."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        """Somewhere."""
        super().reset(seed=seed)
        self._at = self.np_random.uniform(0, SIZE - EDGE, 2)
        self._steps = 0
        return self._picture(), {}

    def step(self, action):
        """Move by three times the action."""
        self._at = np.clip(self._at + 3 * action, 0, SIZE - EDGE)
        self._steps += 1
        return self._picture(), float(self._at[0]), False, self._steps >= 200, {}

    def _picture(self):
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)
        x, y = self._at.astype(int)
        picture[y : y + EDGE, x : x + EDGE] = 255
        return picture


def make(id: str):
    """For `rlinf.workers.environments`."""
    from rlinf.workers.environments.gymnasium import GymnasiumEnvironment

    return GymnasiumEnvironment(Bounce(), id)

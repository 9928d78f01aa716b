"""Where every random number of a simulator comes from: a function of its place, nothing else.

So trajectories are the same however environments are distributed, and whatever died before.
"""

import numpy as np

from rlinf.workers.roles.simulator import FloatArray

__all__ = ["draw_noise", "episode_seed"]

LIMIT = 2**31
"""Of seeds: some environments take signed 32-bit ones only."""


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """The seed of an environment's n-th episode, 0 to 2**31 - 1."""
    words = np.random.SeedSequence((seed, environment, episode)).generate_state(1)
    return int(words[0]) % LIMIT


def draw_noise(place: tuple[int, int, int], kind: str, shape: tuple[int, int]) -> FloatArray:
    """Numbers for a trajectory of one environment, float32 [T, N].

    `place` is (seed of the simulator, environment, number of the request). `kind` is `normal`, or
    `uniform` in [0, 1).
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(place)))
    if kind == "normal":
        return rng.standard_normal(shape, np.float32)
    return rng.random(shape, np.float32)

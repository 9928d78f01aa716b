"""Tiny worlds for the tests of simulators, importable by their processes."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np

from rlinf.workers.roles.simulator import BatchOutcome, Field, Outcome, Spaces


class Counter:
    """Shows (seed, steps so far, last action, resets so far) in one array that it reuses.

    Rewards 1 a step. An episode terminates after `length` steps, `length + seed % spread` with a
    `spread`; it is truncated after `limit`. `mark`: a file; the process that could make it waits,
    dies or raises at step `at` of an episode, as `fault` says.
    """

    spaces = Spaces({"state": Field((4,))}, (-1.0,), (1.0,))

    def __init__(self, length=1000, spread=0, limit=1000, fault="", at=0, mark=""):
        self._length, self._spread, self._limit = length, spread, limit
        self._fault, self._at, self._mark = fault, at, mark
        self._state = np.zeros(4, np.float32)

    def reset(self, seed):
        self._state[:] = seed % 1000, 0, 0, self._state[3] + 1
        self._end = self._length + (seed % self._spread if self._spread else 0)
        return {"state": self._state}

    def step(self, action):
        self._state[1] += 1
        self._state[2] = action[0]
        if self._fault and self._state[1] == self._at:
            self._fail()
        terminated = self._state[1] >= self._end
        truncated = self._state[1] >= self._limit
        done = bool(terminated or truncated)
        return Outcome({"state": self._state}, 1.0, bool(terminated), bool(truncated), done)

    def _fail(self):
        if self._mark:
            try:
                Path(self._mark).touch(exist_ok=False)
            except FileExistsError:
                return
        if self._fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "raises":
            raise RuntimeError("the gripper is jammed")
        while True:
            time.sleep(60)  # stuck on purpose: it is to be killed

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def close(self):
        pass


class Drift:
    """A point that an action pushes: what is shown depends on every action before."""

    spaces = Spaces({"state": Field((2,))}, (-1.0,), (1.0,))

    def reset(self, seed):
        self._x = np.random.default_rng(seed).standard_normal(2).astype(np.float32)
        self._t = 0
        return {"state": self._x}

    def step(self, action):
        self._t += 1
        self._x = np.tanh(1.7 * self._x[::-1] + action[0]).astype(np.float32)
        reward = -float(np.abs(self._x).sum())
        return Outcome({"state": self._x}, reward, bool(self._x[0] > 0.97), self._t >= 20)

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def close(self):
        pass


class Painted(Drift):
    """One that is drawn slowly."""

    def render(self):
        time.sleep(0.25)  # as a renderer works; long enough to be caught at it
        return super().render()


class Steer:
    """Reward -(action - state)^2: a policy learns it within seconds. Episodes of 8 steps."""

    spaces = Spaces({"state": Field((1,))}, (-1.0,), (1.0,))

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._t = 0
        return self._show()

    def _show(self):
        self._target = self._rng.uniform(-1, 1)
        return {"state": np.array([self._target], np.float32)}

    def step(self, action):
        self._t += 1
        reward = -float((action[0] - self._target) ** 2)
        return Outcome(self._show(), reward, False, self._t >= 8, reward > -0.01)

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def close(self):
        pass


def counter(id, **options):
    return Counter(**options)


def drift(id):
    return Drift()


def painted(id, **drawing):
    return Painted()


def steer(id):
    return Steer()


def broken(id):
    with contextlib.suppress(ValueError):
        raise ValueError
    raise RuntimeError("no such world")


class Together:
    """Worlds as one that is stepped by one call; like a device, it steps ended ones as well."""

    def __init__(self, worlds):
        self._worlds = worlds
        self._shown = np.zeros((len(worlds), *worlds[0].spaces.observation["state"].shape))
        for index, world in enumerate(worlds):
            world.reset(index)

    def reset(self, indexes, seeds):
        for index, seed in zip(indexes, seeds, strict=True):
            self._shown[index] = self._worlds[index].reset(seed)["state"]
        return {"state": self._shown}

    def step(self, actions):
        outcomes = [one.step(action) for one, action in zip(self._worlds, actions, strict=True)]
        for index, outcome in enumerate(outcomes):
            self._shown[index] = outcome.observation["state"]
        names = (
            ("reward", "float32"),
            *((n, bool) for n in ("terminated", "truncated", "success")),
        )
        facts = (np.array([getattr(one, name) for one in outcomes], kind) for name, kind in names)
        return BatchOutcome({"state": self._shown}, *facts)


def counter_batch(id, count, **options):
    return Together([Counter(**options) for _ in range(count)]) if id == "together" else None


def drift_batch(id, count):
    return Together([Drift() for _ in range(count)]) if id == "together" else None


class Painter:
    """Shows a picture that is dark or bright: reward 1 for an action of the same sign, else -1."""

    spaces = Spaces(
        {
            "image": Field((16, 16, 3), "uint8"),
            "state": Field((1,)),
            "instruction": Field((16,), "int32"),
        },
        (-1.0, -1.0),
        (1.0, 1.0),
    )

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._t = 0
        self._bright = bool(self._rng.integers(2))
        return self._show()

    def _show(self):
        image = np.full((16, 16, 3), 220 if self._bright else 30, np.uint8)
        return {
            "image": image,
            "state": np.zeros(1, np.float32),
            "instruction": np.arange(16, dtype=np.int32),
        }

    def step(self, action):
        self._t += 1
        right = (action > 0) == self._bright
        return Outcome(self._show(), float(2 * right.mean() - 1), False, self._t >= 6)

    def render(self):
        return self._show()["image"]

    def close(self):
        pass


def painter(id):
    return Painter()


class Guided:
    """A point to be brought to 0, with a script; after 8 steps, a success if it is near `goal`."""

    spaces = Spaces({"state": Field((2,))}, (-1.0, -1.0), (1.0, 1.0))

    def __init__(self, goal=0.0):
        self._goal = goal

    def reset(self, seed):
        self._x = np.array([1.0 if seed % 2 else -1.0, 1.0], np.float32)
        self._t = 0
        return {"state": self._x}

    def expert(self):
        return np.array([-np.sign(self._x[0]) * 0.5, 1.0], np.float32)

    def step(self, action):
        self._t += 1
        self._x[0] += 0.5 * action[0]
        success = self._t >= 8 and abs(self._x[0] - self._goal) < 0.6
        return Outcome({"state": self._x}, float(success), success, self._t >= 8, success)

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def close(self):
        pass


def guided(id, **options):
    return Guided(**options)

"""LIBERO's tasks, pictures and an instruction: `pip install rlinf-workers[libero]`.

Drawn in software: Debian's libosmesa6 and the variable MUJOCO_GL=osmesa, or an EGL device and
MUJOCO_GL=egl. The package wants a MuJoCo below 4, so it has an environment of its own.
"""

import contextlib
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import (
    Environment,
    Field,
    FloatArray,
    Observation,
    Outcome,
    Spaces,
)

__all__ = ["LiberoEnvironment", "instruction_ids", "make"]

HINT = 'pip install "rlinf-workers[libero]" and apt-get install libosmesa6'
STATE = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
WORDS = 1024
"""Ids of words, 0 excepted, which pads."""
LENGTH = 16
SETTLE_STEPS = 10
"""Steps in which objects fall into place and the hand opens: half open, it seems to hold one."""


def instruction_ids(text: str) -> npt.NDArray[np.int32]:
    """The words of an instruction as ids 1 to 1023, int32 [16], 0 after the last one.

    An id is a hash of the word: no vocabulary has to be agreed on.
    """
    words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
    ids = np.zeros(LENGTH, np.int32)
    ids[: len(words)] = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return ids


def make(
    id: str, *, task: int = 0, size: int = 64, limit: int = 300, starts: int = 50
) -> Environment:
    """Task number `task` of the suite `id`, such as libero_object.

    Args:
        size: Height and width of a picture.
        limit: Steps after which an episode is cut off.
        starts: How many of the task's saved initial states are used; a seed picks one of them.

    Raises:
        ConfigError: LIBERO is not installed, or has no such suite or task.
    """
    with contextlib.redirect_stdout(sys.stderr):  # it greets
        try:
            from libero.libero import benchmark, get_libero_path
            from libero.libero.envs import OffScreenRenderEnv
        except ImportError as error:
            raise ConfigError(f"environment {id} needs LIBERO ({error}): {HINT}") from error
        suites = benchmark.get_benchmark_dict()
        if id not in suites:
            raise ConfigError(f"LIBERO has no suite {id}: choose one of {', '.join(suites)}")
        suite = suites[id]()
        if not 0 <= task < suite.n_tasks:
            raise ConfigError(f"{id} has the tasks 0 to {suite.n_tasks - 1}, not {task}")
        chosen = suite.get_task(task)
        path = Path(get_libero_path("bddl_files")) / chosen.problem_folder / chosen.bddl_file
        world = OffScreenRenderEnv(
            bddl_file_name=str(path),
            camera_names=["agentview"],
            camera_heights=size,
            camera_widths=size,
            hard_reset=False,
        )
        states = suite.get_task_init_states(task)[:starts]
    return LiberoEnvironment(world, chosen.language, (size, limit), states)


class LiberoEnvironment:
    """Shows `image` [size, size, 3], `state` (of hand and gripper) and `instruction`.

    The reward is 1 for the step that reaches the goal, which ends the episode, else 0.
    """

    def __init__(
        self, world: Any, language: str, bounds: tuple[int, int], states: npt.NDArray[Any]
    ) -> None:
        self._world, self._states = world, states
        size, self._limit = bounds
        self.language = language
        self._instruction = instruction_ids(language)
        self._image = np.zeros((size, size, 3), np.uint8)
        self._steps = 0
        self._raw: dict[str, Any] = {}
        self.spaces = Spaces(
            observation={
                "image": Field((size, size, 3), "uint8"),
                "state": Field((9,)),
                "instruction": Field((LENGTH,), "int32"),
            },
            low=(-1.0,) * 7,
            high=(1.0,) * 7,
        )

    def reset(self, seed: int) -> Observation:
        """See `Environment`."""
        self._steps = 0
        self._world.seed(seed)
        self._world.reset()
        self._raw = self._world.set_init_state(self._states[seed % len(self._states)])
        rest = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
        for _ in range(SETTLE_STEPS):
            self._raw = self._world.step(rest)[0]
        return self._shown()

    def step(self, action: FloatArray) -> Outcome:
        """See `Environment`: motion of the hand (6) and of the gripper (closes above 0)."""
        self._raw, reward, done, _ = self._world.step(action)
        self._steps += 1
        success = bool(done)
        return Outcome(self._shown(), float(reward), success, self._steps >= self._limit, success)

    def expert(self) -> FloatArray:
        """What a scripted hand does now, which sees where everything is; see `scripted`."""
        return scripted(self._raw, _object_of(self._raw, self.language))

    def render(self) -> npt.NDArray[np.uint8]:
        """See `Environment`: what it shows."""
        return self._image.copy()

    def close(self) -> None:
        """See `Environment`."""
        self._world.close()

    def _shown(self) -> Observation:
        self._image = self._raw["agentview_image"][::-1]  # OpenGL's rows begin below
        state = np.concatenate([self._raw[name] for name in STATE]).astype(np.float32)
        return {"image": self._image, "state": state, "instruction": self._instruction}


def _object_of(raw: dict[str, Any], language: str) -> str:
    """The object that an instruction of libero_object speaks of: `alphabet_soup_1`."""
    names = [name.removesuffix("_pos") for name in raw if name.endswith("_1_pos")]
    spoken = language.replace(" ", "_")
    found = [name for name in names if name.rpartition("_")[0] in spoken and "basket" not in name]
    if not found:
        raise ConfigError(f"there is no script for the task {language!r}")
    return max(found, key=len)


ABOVE = 0.12
SLOPE = 4.0
CARRY = 0.28
GAIN = 10.0


def scripted(raw: dict[str, Any], target: str) -> FloatArray:
    """One action of picking `target` up and dropping it into the basket, from positions alone.

    Towards it, the lower the nearer it is to being over it; close, up, over the basket, open. Which
    of these is read from where things are, and only where the hand itself shows it is there a
    sudden change: that is what can be imitated from pictures.
    """
    hand, thing = raw["robot0_eef_pos"], raw[f"{target}_pos"]
    basket = raw["basket_1_pos"]
    opening = float(np.abs(raw["robot0_gripper_qpos"]).sum())
    away = float(np.linalg.norm(thing[:2] - hand[:2]))
    held = float(np.linalg.norm(thing - hand)) < 0.06 and opening < 0.067
    over = float(np.linalg.norm(basket[:2] - hand[:2])) < 0.03
    aim, close = hand, -1.0
    if held and not over:
        high = hand[2] > CARRY - 0.04
        aim, close = np.array([*(basket[:2] if high else hand[:2]), CARRY]), 1.0
    elif not held:
        height = np.clip(SLOPE * (away - 0.01), 0, ABOVE)
        aim = np.array([*thing[:2], thing[2] + height])
        close = 1.0 if away < 0.015 and hand[2] - thing[2] < 0.015 else -1.0
    move = np.clip(GAIN * (aim - hand), -1, 1)
    return np.array([*move, 0, 0, 0, close], np.float32)

"""The process in which environments run: `python -m rlinf.workers.engines.simulation.process`.

On its standard input comes one frame (4 bytes of length, then a pickled `Opening`), then commands
of a letter and a number each: `b` begin, `s` carry out the decision of step t, `c` act and carry
out t decisions. It answers every frame and command with one byte on its standard output; what the
environments print goes to the standard error. It ends when its input does, so not later than its
parent. An environment that raises ends it: the last line of its standard error says why.
"""

import os
import pickle
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.workers.engines.simulation.memory import Memory, Sizes
from rlinf.workers.engines.simulation.seeds import episode_seed
from rlinf.workers.environments import EnvironmentSpec, make_environment
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import (
    Actor,
    Array,
    Demonstration,
    Environment,
    FloatArray,
    Observation,
    Spaces,
)

__all__ = ["ACT", "BEGIN", "COMMAND", "DONE", "STEP", "Opening", "main"]

COMMAND = struct.Struct("<cI")
LENGTH = struct.Struct("<I")
BEGIN, STEP, ACT, DONE = b"b", b"s", b"c", b"."


@dataclass(frozen=True, slots=True)
class Opening:
    """What a process is told first. With `spaces` None it only says what the spaces are.

    Attributes:
        path: The parent's `sys.path`.
        spec: Of the environments.
        first: Index of its first environment.
        count: How many it has.
        seed: Of the simulator.
        spaces: Of the environments.
        sizes: Of the memory.
        descriptor: Of the memory, inherited.
        actor: Acts here, if it is light.
        film: Not 0: act so many steps at most without noise, and only say what that looked like.
        demonstrate: Not 0: let the environment's script act so many steps at most, in an episode
            for each of `seeds`.
        noise: Of the motions that are carried out then.
        seeds: See `demonstrate`.
    """

    path: tuple[str, ...]
    spec: EnvironmentSpec
    first: int = 0
    count: int = 1
    seed: int = 0
    spaces: Spaces | None = None
    sizes: Sizes | None = None
    descriptor: int = -1
    actor: Actor | None = field(default=None, repr=False)
    film: int = 0
    demonstrate: int = 0
    noise: float = 0.0
    seeds: tuple[int, ...] = ()


class Stepper:
    """The environments of one process over the shared memory."""

    def __init__(self, opening: Opening, spaces: Spaces, sizes: Sizes) -> None:
        self._first, self._seed, self._actor = opening.first, opening.seed, opening.actor
        self._own = slice(opening.first, opening.first + opening.count)
        self._memory = memory = Memory(spaces, sizes, opening.descriptor)
        self._worlds: list[Environment] = []
        for index in range(opening.first, opening.first + opening.count):
            memory["busy"][index] = True
            self._worlds.append(make_environment(opening.spec))
            memory["busy"][index] = False
            memory["ticks"][index] += 1
        self._low = np.array(spaces.low, np.float32)
        self._high = np.array(spaces.high, np.float32)

    def begin(self) -> None:
        """Row 0: what was shown last, or a new episode where `begin` has a seed (else -1)."""
        memory = self._memory
        memory["valid"][:, self._own] = False
        for index in range(self._own.start, self._own.stop):
            seed = int(memory["begin"][index])
            if seed >= 0:
                self._reset(index, 0, seed)
                memory["begin"][index] = -1
            elif row := memory["row"][index]:
                self._show({n: a[row, index] for n, a in memory.shown.items()}, index, 0)
        if self._actor is not None:
            self._actor.load(memory["weights"])

    def step(self, t: int) -> None:
        """Carry out every environment's decision of row t."""
        actions = self._memory["actions"][t, self._own]
        np.clip(actions, self._low, self._high, out=actions)
        for index in range(self._own.start, self._own.stop):
            if not self._memory["resting"][index]:
                self._step(index, t)

    def act(self, steps: int) -> None:
        """Choose and carry out the decisions of rows 0 to steps - 1."""
        memory, own, actor = self._memory, self._own, self._actor
        assert actor is not None
        greedy = bool(memory["greedy"][own.start])
        for t in range(steps):
            shown = {name: array[t, own] for name, array in memory.shown.items()}
            decision = actor.act(shown, None if greedy else memory["noise"][t, own])
            memory["choices"][t, own] = decision.choices
            memory["actions"][t, own] = decision.actions
            memory["logprobs"][t, own] = decision.logprobs
            self.step(t)
            if memory["resting"][own].all():
                return

    def _step(self, index: int, t: int) -> None:
        memory, world = self._memory, self._worlds[index - self._first]
        total, count, over = 0.0, 0, False
        for action in memory["actions"][t, index]:
            memory["busy"][index] = True
            outcome = world.step(action)
            memory["busy"][index] = False
            memory["ticks"][index] += 1
            total, count = total + outcome.reward, count + 1
            memory["success"][index] |= outcome.success
            if over := outcome.terminated or outcome.truncated:
                break
        memory["rewards"][t, index] = total
        memory["steps"][t, index] = count
        memory["terminated"][t, index] = outcome.terminated
        memory["truncated"][t, index] = outcome.truncated and not outcome.terminated
        memory["reward"][index] += total
        memory["length"][index] += count
        if over:
            self._end(index, t, outcome.observation)
        else:
            self._show(outcome.observation, index, t + 1)
        memory["valid"][t, index] = True

    def _end(self, index: int, t: int, last: Observation) -> None:
        memory = self._memory
        for name, array in memory.final.items():
            array[t, index] = last[name]
        for ended, now in (("seed",) * 2, ("reward",) * 2, ("steps", "length"), ("success",) * 2):
            memory[f"ended_{ended}"][t, index] = memory[now][index]
        if memory["rests"][index]:
            memory["resting"][index] = True
            self._show(last, index, t + 1)
            return
        memory["episode"][index] += 1
        seed = episode_seed(self._seed, index, int(memory["episode"][index]))
        self._reset(index, t + 1, seed)

    def _reset(self, index: int, t: int, seed: int) -> None:
        memory = self._memory
        memory["busy"][index] = True
        shown = self._worlds[index - self._first].reset(seed)
        memory["busy"][index] = False
        memory["ticks"][index] += 1
        memory["seed"][index], memory["reward"][index], memory["length"][index] = seed, 0.0, 0
        memory["success"][index] = memory["resting"][index] = False
        self._show(shown, index, t)

    def _show(self, shown: Observation, index: int, t: int) -> None:
        for name, array in self._memory.shown.items():
            array[t, index] = shown[name]
        self._memory["row"][index] = t


def _film(opening: Opening) -> list[Array]:
    """The pictures of one episode, [H, W, 3] each."""
    world, actor = make_environment(opening.spec), opening.actor
    assert actor is not None
    shown = world.reset(opening.seed)
    low, high = (np.array(bound, np.float32) for bound in (world.spaces.low, world.spaces.high))
    frames = [world.render()]
    while len(frames) < opening.film:
        decision = actor.act({name: array[None] for name, array in shown.items()}, None)
        for action in decision.actions[0]:
            outcome = world.step(np.clip(action, low, high))
            frames.append(world.render())
            if outcome.terminated or outcome.truncated:
                return frames
        shown = outcome.observation
    return frames


def _demonstrate(opening: Opening) -> list[Demonstration]:
    """Episodes of the environment's script."""
    world: Any = make_environment(opening.spec)
    if not hasattr(world, "expert"):
        raise ConfigError(f"{opening.spec.label} has no script to learn from")
    return [_demonstration(world, opening, seed) for seed in opening.seeds]


def _demonstration(world: Any, opening: Opening, seed: int) -> Demonstration:
    """One of them. Numbers that the script leaves at 0 are left alone: it would not correct them.

    The last number of an action, that of a gripper, is left alone too.
    """
    rng = np.random.default_rng(seed)
    shown, success = world.reset(seed), False
    seen: list[Observation] = []
    wanted: list[FloatArray] = []
    low, high = (np.array(bound, np.float32) for bound in (world.spaces.low, world.spaces.high))
    while len(wanted) < opening.demonstrate:
        seen.append({name: np.array(array) for name, array in shown.items()})
        wanted.append(world.expert())
        noise = opening.noise * rng.standard_normal(len(low)) * (wanted[-1] != 0)
        noise[-1] = 0
        outcome = world.step(np.clip(wanted[-1] + noise, low, high).astype(np.float32))
        shown, success = outcome.observation, success or outcome.success
        if outcome.terminated or outcome.truncated:
            break
    arrays = {name: np.stack([one[name] for one in seen]) for name in seen[0]}
    return Demonstration(arrays, np.stack(wanted), success)


def _opening() -> Opening:
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        sys.exit(0)
    path, body = pickle.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))
    sys.path[:] = path
    opening: Opening = pickle.loads(body)
    return opening


def main() -> None:
    """Obey until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)
    opening = _opening()
    if opening.film or opening.demonstrate:
        with os.fdopen(answers, "wb") as pipe:
            pickle.dump((_film if opening.film else _demonstrate)(opening), pipe)
        return
    if opening.spaces is None or opening.sizes is None:
        os.write(answers, pickle.dumps(make_environment(opening.spec).spaces))
        return
    stepper = Stepper(opening, opening.spaces, opening.sizes)
    os.write(answers, DONE)
    while len(command := os.read(0, COMMAND.size)) == COMMAND.size:
        letter, number = COMMAND.unpack(command)
        if letter == BEGIN:
            stepper.begin()
        elif letter == STEP:
            stepper.step(number)
        else:
            stepper.act(number)
        os.write(answers, DONE)


if __name__ == "__main__":
    main()

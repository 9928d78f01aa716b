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
from typing import Any

import numpy as np

from rlinf.workers.engines.simulation.batch_stepper import BatchStepper
from rlinf.workers.engines.simulation.memory import Sizes
from rlinf.workers.engines.simulation.stepper import Opening, Stepper
from rlinf.workers.environments import make_batch, make_environment
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import (
    Array,
    Demonstration,
    FloatArray,
    Observation,
    Spaces,
)

__all__ = ["ACT", "BEGIN", "COMMAND", "DONE", "LENGTH", "STEP", "main", "open_stepper"]

COMMAND = struct.Struct("<cI")
LENGTH = struct.Struct("<I")
BEGIN, STEP, ACT, DONE = b"b", b"s", b"c", b"."


def open_stepper(opening: Opening, spaces: Spaces, sizes: Sizes) -> Stepper:
    """The environments that a process is told to make: one simulation of all, or one each."""
    batch = make_batch(opening.spec, opening.count)
    if batch is None:
        return Stepper(opening, spaces, sizes)
    return BatchStepper(opening, spaces, sizes, batch)


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
    stepper = open_stepper(opening, opening.spaces, opening.sizes)
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

"""The memory that a simulator shares with its processes: one array a quantity, time first.

An environment's process writes its own columns, the simulator reads all of them: nothing that an
environment shows or takes goes through a pipe. Pages that nobody writes to take up no memory, so
room for the last observation of an episode at every step costs what is used of it.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlinf.workers.roles.simulator import Array, Field, Spaces

__all__ = ["Memory", "Sizes"]

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides the layout.

    Attributes:
        environments: E, of all lanes.
        steps: T, decisions of one trajectory at most.
        chunk: Actions of a decision.
        choice: Of a decision, as the actor records it.
        weights: Numbers of a light actor; 0: none acts in the processes.
        noise: Random numbers of a decision.
    """

    environments: int
    steps: int
    chunk: int
    choice: Field
    weights: int
    noise: int


def _fields(spaces: Spaces, sizes: Sizes) -> dict[str, Field]:
    count, steps, size = sizes.environments, sizes.steps, spaces.action_size
    grid = (steps, count)
    fields = {
        "choices": Field((*grid, *sizes.choice.shape), sizes.choice.dtype),
        "actions": Field((*grid, sizes.chunk, size)),
        "noise": Field((*grid, sizes.noise)),
        "logprobs": Field(grid),
        "rewards": Field(grid),
        "terminated": Field(grid, "bool"),
        "truncated": Field(grid, "bool"),
        "valid": Field(grid, "bool"),
        "steps": Field(grid, "int32"),
        # Of the episode that ended with a decision.
        "ended_seed": Field(grid, "int64"),
        "ended_reward": Field(grid, "float64"),
        "ended_steps": Field(grid, "int32"),
        "ended_success": Field(grid, "bool"),
        # Of the episode under way.
        "seed": Field((count,), "int64"),
        "reward": Field((count,), "float64"),
        "length": Field((count,), "int32"),
        "success": Field((count,), "bool"),
        "resting": Field((count,), "bool"),
        "episode": Field((count,), "int64"),
        "row": Field((count,), "int64"),
        # What the simulator asks for, and what a process is at.
        "begin": Field((count,), "int64"),
        "rests": Field((count,), "bool"),
        "greedy": Field((count,), "bool"),
        "ticks": Field((count,), "int64"),
        "busy": Field((count,), "bool"),
        "weights": Field((sizes.weights,)),
    }
    for name, field in spaces.observation.items():
        fields[f"shown.{name}"] = Field((steps + 1, count, *field.shape), field.dtype)
        fields[f"final.{name}"] = Field((grid[0], count, *field.shape), field.dtype)
    return fields


class Memory(dict[str, Array]):
    """Arrays over one descriptor, by name: see `_fields`.

    Args:
        spaces: Of the environments.
        sizes: See `Sizes`.
        descriptor: Of the memory another process has made; None: make it.
    """

    def __init__(self, spaces: Spaces, sizes: Sizes, descriptor: int | None = None) -> None:
        fields = _fields(spaces, sizes)
        starts, end = {}, 0
        for name, field in fields.items():
            starts[name] = end
            end += -(-_nbytes(field) // ALIGN) * ALIGN
        self.descriptor = os.memfd_create("rlinf-simulator") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, end)
        self._map = mmap.mmap(self.descriptor, end)
        super().__init__(
            (name, np.ndarray(f.shape, f.dtype, self._map, starts[name]))
            for name, f in fields.items()
        )
        self.shown = self._part("shown.")
        self.final = self._part("final.")

    def _part(self, prefix: str) -> Mapping[str, Array]:
        return {
            name.removeprefix(prefix): array
            for name, array in self.items()
            if name.startswith(prefix)
        }

    def close(self) -> None:
        """Close the descriptor; the memory lives on in arrays that somebody still holds."""
        os.close(self.descriptor)


def _nbytes(field: Field) -> int:
    return int(np.prod(field.shape, dtype=np.int64)) * np.dtype(field.dtype).itemsize

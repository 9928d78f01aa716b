"""The environments of one process, simulated together: one call steps all of them."""

import numpy as np

from rlinf.workers.engines.simulation.memory import Sizes
from rlinf.workers.engines.simulation.stepper import Opening, Stepper
from rlinf.workers.roles.simulator import EnvironmentBatch, Spaces

__all__ = ["BatchStepper"]


class BatchStepper(Stepper):
    """For its arguments see `Stepper`, and `EnvironmentBatch`.

    One that rests is simulated with the others, but nothing of it is kept.
    """

    def __init__(
        self, opening: Opening, spaces: Spaces, sizes: Sizes, batch: EnvironmentBatch
    ) -> None:
        self._batch = batch
        super().__init__(opening, spaces, sizes)

    def _make(self, opening: Opening) -> None:
        """It was made already."""

    def _step(self, t: int) -> None:
        memory, own = self._memory, self._own
        going = ~memory["resting"][own]
        begun = going.copy()
        for name in ("rewards", "steps", "terminated", "truncated"):
            memory[name][t, own] = 0
        for action in memory["actions"][t, own].swapaxes(0, 1):
            if not going.any():
                break
            memory["busy"][own] = True
            outcome = self._batch.step(action)
            memory["busy"][own] = False
            memory["ticks"][own] += 1
            memory["rewards"][t, own] += np.where(going, outcome.rewards, 0)
            memory["steps"][t, own] += going
            memory["success"][own] |= going & outcome.success
            memory["terminated"][t, own] |= going & outcome.terminated
            memory["truncated"][t, own] |= going & outcome.truncated & ~outcome.terminated
            for name, array in memory.shown.items():
                array[t + 1, own][going] = outcome.observation[name][going]
            going &= ~(outcome.terminated | outcome.truncated)
        memory["row"][own][begun] = t + 1
        memory["reward"][own] += memory["rewards"][t, own]
        memory["length"][own] += memory["steps"][t, own]
        self._settle(t, begun & ~going)
        memory["valid"][t, own] = begun

    def _settle(self, t: int, over: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
        """Ends of episodes, and what begins after them: together as well."""
        shown = self._memory.shown.items()
        fresh = [
            index
            for index in (self._first + np.flatnonzero(over)).tolist()
            if self._end(index, t, {name: array[t + 1, index] for name, array in shown})
        ]
        if fresh:
            self._reset(fresh, t + 1, [self._next_seed(index) for index in fresh])

    def _reset(self, indexes: list[int], t: int, seeds: list[int]) -> None:
        memory, places = self._memory, np.array(indexes) - self._first
        memory["busy"][self._own] = True
        shown = self._batch.reset(places, np.array(seeds))
        memory["busy"][self._own] = False
        memory["ticks"][self._own] += 1
        for index, place, seed in zip(indexes, places, seeds, strict=True):
            self._begun(index, t, seed, {name: array[place] for name, array in shown.items()})

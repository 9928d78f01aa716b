"""Environments in processes as a plain vector: actions in, what they show out, all in step."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from rlinf.workers.engines.simulation.fleet import Fleet, readable
from rlinf.workers.engines.simulation.lane import Lane
from rlinf.workers.engines.simulation.process import BEGIN, STEP
from rlinf.workers.roles.simulator import Array, FloatArray

__all__ = ["VectorEnvironment"]


class VectorEnvironment(Fleet):
    """For its arguments see `Fleet`."""

    def reset(self, seeds: Mapping[int, int], *, rests: bool = False) -> Mapping[str, Array]:
        """Begin episodes in some environments, seeds by index; all others stay as they are.

        `rests`: those lanes rest after an end until they are reset again; otherwise the next
        episode begins by itself. Returns what all environments show, [E, ...]: views that the next
        step changes.
        """
        memory = self._memory
        touched = [
            lane
            for lane in self._lanes
            if any(i in seeds for i in range(lane.own.start, lane.own.stop))
        ]
        for lane in touched:
            memory["rests"][lane.own] = rests
        for index, seed in seeds.items():
            memory["begin"][index] = seed
        self._carry_out(touched, BEGIN)
        return self._shown_now()

    def step(self, actions: FloatArray) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """Carry out a decision of every environment, actions [E, C, A]; wait for all.

        Returns what they show now, and rewards, terminated, truncated, valid, steps, each [E]:
        views that the next step changes. Not valid: it rests, or its process was lost.
        """
        memory = self._memory
        memory["valid"][0] = False
        memory["actions"][0] = actions
        self._carry_out(self._lanes, STEP)
        names = ("rewards", "terminated", "truncated", "valid", "steps")
        return self._shown_now(), {name: memory[name][0] for name in names}

    def finals(self) -> Mapping[str, Array]:
        """What episodes ended with in the last `step`, [E, ...]; rows without an end are old."""
        return {name: array[0] for name, array in self._memory.final.items()}

    def _shown_now(self) -> Mapping[str, Array]:
        rows = self._memory["row"]
        if (rows == rows[0]).all():
            return {name: array[rows[0]] for name, array in self._memory.shown.items()}
        columns = np.arange(len(rows))
        return {name: array[rows, columns] for name, array in self._memory.shown.items()}

    def _carry_out(self, lanes: Sequence[Lane], letter: bytes) -> None:
        """Give a command to lanes and wait for all of them; lanes that are lost are replaced."""
        waiting = list(lanes)
        fresh = [lane for lane in lanes if lane.waiting]
        for lane in lanes:
            if lane not in fresh:
                lane.tell(letter)
        while waiting:
            ready = readable(waiting, self._look_s)
            for lane in list(waiting):
                if lane in ready and lane.answer():
                    if lane in fresh:
                        fresh.remove(lane)
                        lane.tell(BEGIN if letter == STEP else letter)
                        continue
                    lane.failures = 0
                    waiting.remove(lane)
                elif lane in ready or lane.is_stuck(time.monotonic()):
                    self._replace(lane, lane not in ready)
                    fresh.append(lane)
                    if letter == STEP:
                        waiting.remove(lane)

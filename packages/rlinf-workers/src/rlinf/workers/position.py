"""Position: how far a run is in its data, and which items are still on their way.

Items are numbered from 0 in the order of the data set (or of the random draws that make them). A
program draws numbers, sends what they stand for through its flow, and says which were trained on.
What is on its way when a checkpoint is written is drawn again after it, before anything new: over a
run and those that resume it each number is trained on once, whatever was cut off, and however far
sampling was ahead of training.
"""

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Position"]


class Position:
    """Not thread-safe: the program's main thread drives it."""

    def __init__(self) -> None:
        self._next = 0
        self._again: list[int] = []
        self._away: set[int] = set()

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Drawn and not trained on, ascending."""
        return tuple(sorted(self._away))

    def draw(self, count: int) -> list[int]:
        """Numbers to send: those that were cut off first."""
        taken, self._again = self._again[:count], self._again[count:]
        fresh = range(self._next, self._next + count - len(taken))
        self._next = fresh.stop
        drawn = [*taken, *fresh]
        self._away.update(drawn)
        return drawn

    def room(self, batch: int, max_staleness: int) -> int:
        """How many items may be drawn now, where a step trains on `batch`.

        With so many on their way, at most, one that is trained on in the order of drawing is at
        most `max_staleness` steps behind. It does not depend on how far the run is, so a resumed
        run does not begin with a burst.
        """
        return max(0, (max_staleness + 1) * batch - len(self._away))

    def trained(self, numbers: Iterable[int]) -> None:
        """These have been trained on. Raises `ValueError`: one was not on its way."""
        for number in numbers:
            if number not in self._away:
                raise ValueError(f"item {number} is not on its way: it was trained on before")
            self._away.remove(number)

    def state(self) -> dict[str, Any]:
        """As JSON has it; to be saved with the weights that know of what was trained."""
        return {"next": self._next, "in_flight": sorted({*self._away, *self._again})}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go back to there; None: to the beginning."""
        self._next = state["next"] if state else 0
        self._again = list(state["in_flight"]) if state else []
        self._away = set()

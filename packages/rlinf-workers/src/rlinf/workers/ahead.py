"""Ahead: work that is begun some steps before the step which uses it.

What a step learns from is made with the weights that were there when it was begun: at most so many
versions old as it was begun steps ahead. The bound holds by what is begun, and when; nothing that
was made has to be thrown away, and it makes no difference where a run begins.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Ahead"]

T = TypeVar("T")


class Ahead(Generic[T]):
    """Not thread-safe: the program's main thread drives it.

    Args:
        begin: Begins the work of a step, and returns what it will be had by.
        give_up: Ends the work of a step that will not be used.
        last: The last step.
    """

    def __init__(
        self, begin: Callable[[int], T], give_up: Callable[[int], object], last: int
    ) -> None:
        self._begin, self._give_up, self._last = begin, give_up, last
        self._begun: dict[int, T] = {}

    def take(self, step: int, ahead: int) -> T:
        """What was begun for this step; begins it, and up to `ahead` after it, where need be."""
        for number in range(step, min(step + ahead, self._last) + 1):
            if number not in self._begun:
                self._begun[number] = self._begin(number)
        return self._begun.pop(step)

    def clear(self) -> None:
        """Nothing that was begun will be used: steps are repeated."""
        while self._begun:
            self._give_up(self._begun.popitem()[0])

"""Types of configuration fields that say which values make sense: `steps: Count`."""

import math
from dataclasses import dataclass
from typing import Annotated

__all__ = ["Bounds", "Count", "Natural", "NonNegative", "Positive", "Share"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of finite numbers, for `Annotated`.

    Attributes:
        least: The smallest one.
        most: The largest one.
        exclusive: `least` itself does not belong to it.
    """

    least: float = -math.inf
    most: float = math.inf
    exclusive: bool = False

    def __contains__(self, value: float) -> bool:
        low = value > self.least if self.exclusive else value >= self.least
        return math.isfinite(value) and low and value <= self.most

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"from {self.least:g} to {self.most:g}"
        return f"{'above' if self.exclusive else 'at least'} {self.least:g}"


Count = Annotated[int, Bounds(1)]
Natural = Annotated[int, Bounds(0)]
Positive = Annotated[float, Bounds(0, exclusive=True)]
NonNegative = Annotated[float, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]

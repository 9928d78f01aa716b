"""What goes wrong in a schedule of the simulation, and how often."""

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Troubles:
    """How bad the world is. Probabilities are for each message or step."""

    loss: float = 0.0
    twice: float = 0.0
    restarts: int = 0
    """How often the server dies."""
    death: float = 0.0
    poison: bool = False
    """Whether one item kills every consumer that begins on it."""
    deaths: int = 2
    """How often a consumer may die."""
    silence: float = 0.15
    """That a consumer falls silent with what it holds."""
    stop: float = 0.05
    """That one is stopped when an answer comes."""


NONE = Troubles(deaths=0, silence=0.0, stop=0.0)
SINGLE = (
    replace(NONE, loss=0.1),
    replace(NONE, twice=0.5),
    replace(NONE, restarts=1, death=0.3),
    replace(NONE, poison=True),
    replace(NONE, deaths=1),
    replace(NONE, silence=0.15),
    replace(NONE, stop=0.3),
)
"""What can go wrong, one at a time."""


def several(rng: random.Random) -> Troubles:
    """Several at a time."""
    bad = rng.random() < 0.7
    return Troubles(
        loss=rng.choice([0.0, 0.1, 0.3]) if bad else 0.0,
        twice=rng.choice([0.0, 0.2]) if bad else 0.0,
        restarts=rng.choice([0, 1, 1, 2]),
        death=rng.choice([0.02, 0.1]),
        poison=rng.random() < 0.1,
    )

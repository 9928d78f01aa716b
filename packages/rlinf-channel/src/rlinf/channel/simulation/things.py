"""Single items of the simulation, which look into runs as no server does."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from rlinf.channel.run import Run, total


class Thing(NamedTuple):
    """One item; its payload is its name."""

    payload: str
    weight: float
    key: str | None
    nbytes: int
    order: int = 0
    returns: int = 0


def things_of(runs: Iterable[Run]) -> list[Thing]:
    """The items of runs, one by one."""
    return [
        Thing(
            run.payload[at],  # type: ignore[index]
            total(run.weights, at, at + 1),
            run.key,
            int(total(run.sizes, at, at + 1)),
            run.order + at - run.first,
            run.returns,
        )
        for run in runs
        for at in range(run.first, run.end)
    ]


def runs_of(things: Sequence[Thing]) -> list[Run]:
    """A message of these items: a run for each change of key."""
    names, weights = [thing.payload for thing in things], [thing.weight for thing in things]
    sizes = [thing.nbytes for thing in things]
    runs: list[Run] = []
    first = 0
    for key, same in groupby(things, key=lambda thing: thing.key):
        count = len(list(same))
        runs.append(Run(names, weights, sizes, key, count, first))
        first += count
    return runs

"""A cycle of components: how long it takes to go round."""

import itertools

import numpy as np

from rlinf.sched.cost import CostModel, Options
from rlinf.sched.machine import Counts
from rlinf.sched.tree import Leaf, Loop

PARTS = (2, 4)
"""Into how many parts the batch of an opened cycle is cut."""


def loop_options(model: CostModel, i: int, beside: int) -> Options:
    """The members of cycle ``i`` in turn on the same devices, or apart, in alternation.

    A member's times in the profile are for one round of the whole batch.
    """
    rounds = model.profile.rounds.get(model.names[i], 1)
    names = model.parts_of(i)
    width = len(model.machine.counts)
    used: list[tuple[int, ...]] = []
    seconds: list[float] = []
    loops: list[Loop] = []
    whole = [_member(model, name, 1, beside) for name in names]
    for choice in itertools.product(*whole):
        taken = np.max([used for used, _, _ in choice], axis=0)
        if (taken <= model.machine.counts).all():
            used.append(tuple(taken))
            seconds.append(rounds * sum(time for _, time, _ in choice))
            loops.append(Loop(tuple(leaf for _, _, leaf in choice), rounds))
    for parts in PARTS:
        for choice in itertools.product(*(_member(model, n, parts, beside) for n in names)):
            taken = np.sum([used for used, _, _ in choice], axis=0)
            if (taken <= model.machine.counts).all():
                used.append(tuple(taken))
                seconds.append(alternating([time for _, time, _ in choice], rounds, parts))
                loops.append(Loop(tuple(leaf for _, _, leaf in choice), rounds, parts))
    taken_all = np.array(used, np.int64).reshape(len(used), width)
    devices = taken_all[:, : len(model.machine.types)].sum(axis=1)
    return Options(taken_all, np.array(seconds), model.names[i], devices, (), tuple(loops))


def alternating(times: list[float], rounds: int, parts: int) -> float:
    """Seconds for ``parts`` parts to go ``rounds`` times through members of these ``times``.

    Every member works on one part at a time; a part waits until it has gone round before it
    starts the next round. The steady period of a round is the larger of the busiest member's
    work and the time of one part all the way round.
    """
    period = max(parts * max(times), sum(times))
    return (rounds - 1) * period + sum(times) + (parts - 1) * max(times)


def _member(
    model: CostModel, name: str, parts: int, beside: int
) -> list[tuple[Counts, float, Leaf]]:
    options = model.member_options(name, model.batch / parts, beside)
    found = []
    for k in range(len(options.seconds)):
        leaf = options.leaf(k, None)
        assert isinstance(leaf, Leaf)
        found.append((options.used[k], float(options.seconds[k]), leaf))
    return found

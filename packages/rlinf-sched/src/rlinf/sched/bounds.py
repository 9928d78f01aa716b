"""What no plan can beat."""

from collections.abc import Sequence

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.fit import Floats
from rlinf.sched.packing import Packing, run_times

STEPS = 60


def lower_bound(
    model: CostModel, packing: Packing | None, micro_batches: Sequence[int] = ()
) -> float:
    """Seconds below which no plan can lie.

    Three arguments: a component takes at least its quickest run; the devices are busy for at
    least the least device-seconds of every component, at a size at which it is quick enough; and
    the components must fit beside and after one another.
    """
    work = [_work(run_times(model, i, micro_batches)) for i in range(len(model.names))]
    if any(not len(seconds) for _, seconds in work):
        return float("inf")
    floor = max(float(seconds.min()) for _, seconds in work)
    devices = float(model.machine.counts[: len(model.machine.types)].sum())
    low, high = floor, max(floor, sum(float(s.max()) for _, s in work))
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _area(work, middle) > devices * middle:
            low = middle
        else:
            high = middle
    return max(low, packing.seconds if packing is not None else 0.0)


def _work(times: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    devices, seconds = zip(*times, strict=True)
    return np.concatenate(devices), np.concatenate(seconds)


def _area(work: list[tuple[Floats, Floats]], limit: float) -> float:
    total = 0.0
    for devices, seconds in work:
        able = seconds <= limit
        total += float((seconds[able] * devices[able]).min()) if able.any() else np.inf
    return total

"""What no plan can beat."""

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.fit import Floats

PARTS = (1, 4, 16, 64, 256)
STEPS = 60


def lower_bound(model: CostModel) -> float:
    """Seconds below which no plan can lie.

    Two arguments: a component takes at least its quickest run; and the devices are busy for at
    least the least device-seconds of every component, at a size at which it is quick enough.
    """
    work = [_work(model, i) for i in range(len(model.names))]
    if any(not len(seconds) for seconds, _ in work):
        return float("inf")
    floor = max(float(seconds.min()) for seconds, _ in work)
    devices = float(model.machine.counts[: len(model.machine.types)].sum())
    low, high = floor, max(floor, sum(float(s.max()) for s, _ in work))
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _area(work, middle) > devices * middle:
            low = middle
        else:
            high = middle
    return low


def _work(model: CostModel, i: int) -> tuple[Floats, Floats]:
    """Seconds and devices of all options of a component, for the batch in however many parts."""
    seconds, devices = [], []
    for parts in PARTS:
        if parts <= model.batch and (parts == 1 or model.chunkable(i)):
            options = model.options(i, parts)
            seconds.append(options.seconds * (1 if options.loops else parts))
            devices.append(options.devices.astype(float))
    return np.concatenate(seconds), np.concatenate(devices)


def _area(work: list[tuple[Floats, Floats]], limit: float) -> float:
    total = 0.0
    for seconds, devices in work:
        able = seconds <= limit
        total += float((seconds[able] * devices[able]).min()) if able.any() else np.inf
    return total

"""Times of one component as a table of what was measured, quick to read between the samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.sched.fit import Floats


@dataclass(frozen=True, slots=True)
class Column:
    """Samples on one number of devices.

    Attributes:
        batches: items, increasing.
        seconds: mean time for each.
        overhead_s: part of a call that does not depend on its items, where only one batch was
            measured.
    """

    batches: tuple[float, ...]
    seconds: tuple[float, ...]
    overhead_s: float

    def at(self, batch: float) -> float:
        """Seconds for ``batch`` items: straight lines between the samples and beyond."""
        known, times = self.batches, self.seconds
        if len(known) == 1:
            fixed = min(self.overhead_s, times[0])
            return fixed + (times[0] - fixed) * batch / known[0]
        upper = 1
        while upper < len(known) - 1 and known[upper] < batch:
            upper += 1
        b0, b1, t0, t1 = known[upper - 1], known[upper], times[upper - 1], times[upper]
        slope = (t1 - t0) / (b1 - b0)
        if not b0 <= batch <= b1:
            slope = max(0.0, slope)
        base = t0 if batch <= b1 else t1 - slope * (b1 - b0)
        # Below the smallest batch a call may cost less, but never less than half its share.
        floor = 0.5 * times[0] * min(1.0, batch / known[0])
        return max(base + slope * (batch - b0), floor)


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Columns by number of devices.

    Attributes:
        devices: increasing.
        columns: one for each.
    """

    devices: tuple[int, ...]
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, runs: Sequence[tuple[int, float, float]], overhead_s: float) -> "TimeTable":
        """A table of (devices, batch, seconds); repeated runs are averaged."""
        found: dict[int, dict[float, list[float]]] = {}
        for devices, batch, seconds in runs:
            found.setdefault(devices, {}).setdefault(batch, []).append(seconds)
        sizes = tuple(sorted(found))
        columns = []
        for n in sizes:
            batches = tuple(sorted(found[n]))
            means = tuple(math.fsum(found[n][b]) / len(found[n][b]) for b in batches)
            columns.append(Column(batches, means, overhead_s))
        return cls(sizes, tuple(columns))

    def at(self, log_devices: Floats, batch: float) -> Floats:
        """Seconds for ``batch`` items on each number of devices.

        Between the sampled sizes straight lines on log-log paper, beyond them the power law
        fitted through all of them.

        Args:
            log_devices: natural logarithms of the sizes asked for; shape (k,).
        """
        x = [math.log(n) for n in self.devices]
        y = [math.log(max(column.at(batch), 1e-12)) for column in self.columns]
        if len(x) == 1:
            return np.asarray(np.exp(y[0] + x[0] - log_devices))
        middle, mean = sum(x) / len(x), sum(y) / len(y)
        spread = sum((a - middle) ** 2 for a in x)
        slope = sum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True)) / spread
        inside = np.interp(log_devices, x, y)
        if slope < 0:
            inside += slope * np.maximum(log_devices - x[-1], 0)
            inside += slope * np.minimum(log_devices - x[0], 0)
        return np.asarray(np.exp(inside))

"""How a time falls with the number of devices, from a few samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlinf.sched.errors import ExtrapolationError

Floats = npt.NDArray[np.float64]

MAX_EXTRAPOLATION = 4.0
"""A fit is trusted up to this factor beyond the smallest and largest sample."""

EXPONENTS = np.linspace(0.05, 1.3, 126)


@dataclass(frozen=True, slots=True)
class TimeFit:
    """``seconds = scale / n ** exponent + floor``, fitted to the relative error.

    Attributes:
        low: smallest number of devices measured.
        high: largest number of devices measured.
        held_out_error: the largest relative error on a sample when it is left out of the fit;
            infinite where there are fewer than three samples.
    """

    scale: float
    exponent: float
    floor: float
    low: float
    high: float
    held_out_error: float

    def __call__(self, devices: float, *, anyway: bool = False) -> float:
        """Seconds on ``devices``.

        Raises:
            ExtrapolationError: more than four times beyond the samples, unless ``anyway``.
        """
        if not anyway and not self.covers(devices):
            raise ExtrapolationError(
                f"{devices:g} devices is more than {MAX_EXTRAPOLATION:g} times beyond the samples "
                f"({self.low:g} to {self.high:g}); measure closer, or pass anyway=True"
            )
        return float(self.scale / devices**self.exponent + self.floor)

    def covers(self, devices: float) -> bool:
        """Within four times of what was measured."""
        return self.low / MAX_EXTRAPOLATION <= devices <= self.high * MAX_EXTRAPOLATION


def fit_times(devices: Sequence[float], seconds: Sequence[float]) -> TimeFit:
    """Fit a power law with a floor, or without where the floor does not pay.

    The floor is kept only when it predicts held-out samples better: with three samples or fewer
    the plain power law is more accurate beyond the samples.

    Raises:
        ValueError: no samples, or times or sizes that are not positive.
    """
    n, t = np.asarray(devices, float), np.asarray(seconds, float)
    if not len(n) or len(n) != len(t) or (n <= 0).any() or (t <= 0).any():
        raise ValueError(f"need positive sizes and times of equal number, got {n} and {t}")
    candidates = [(_power(n, t), _held_out(n, t, _power))]
    if len(set(n.tolist())) >= 4:
        candidates.append((_floored(n, t), _held_out(n, t, _floored)))
    (scale, exponent, floor), error = min(candidates, key=lambda c: c[1])
    return TimeFit(scale, exponent, floor, float(n.min()), float(n.max()), error)


Law = tuple[float, float, float]


def _power(n: Floats, t: Floats) -> Law:
    if len(set(n.tolist())) == 1:
        return float(np.exp(np.log(t).mean()) * n[0]), 1.0, 0.0
    slope, offset = np.polyfit(np.log(n), np.log(t), 1)
    return float(np.exp(offset)), float(-slope), 0.0


def _floored(n: Floats, t: Floats) -> Law:
    best: tuple[float, Law] = (np.inf, _power(n, t))
    for exponent in EXPONENTS:
        columns = np.stack([n**-exponent, np.ones_like(n)], axis=1) / t[:, None]
        (scale, floor), *_ = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)
        if scale <= 0 or floor < 0:
            continue
        error = float(np.square(columns @ np.array([scale, floor]) - 1).sum())
        if error < best[0]:
            best = error, (float(scale), float(exponent), float(floor))
    return best[1]


def _held_out(n: Floats, t: Floats, law: Callable[[Floats, Floats], Law]) -> float:
    if len(n) < 3:
        return float("inf")
    worst = 0.0
    for out in range(len(n)):
        kept = np.arange(len(n)) != out
        scale, exponent, floor = law(n[kept], t[kept])
        worst = max(worst, abs(scale / n[out] ** exponent + floor - t[out]) / t[out])
    return float(worst)

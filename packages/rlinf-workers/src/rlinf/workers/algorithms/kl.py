"""Estimates of KL(policy || reference) from the log-probs of sampled tokens, never below float32.

With d = log(reference) - log(policy) of a token that the policy sampled (Schulman 2020,
http://joschu.net/blog/kl-approx.html):

    k1 = -d                     unbiased, high variance; as a *loss* its expected gradient is 0
    k2 = d^2 / 2                biased value; as a loss its expected gradient is exactly that of KL
    k3 = exp(d) - 1 - d         unbiased, never negative; as a loss its expected gradient is that of
                                KL(reference || policy), not of KL(policy || reference)

So: k3 to look at, k2 to train with; `k3+` and `k1+` have the value of one and the gradient of k2.
"""

import torch
from torch import Tensor

from rlinf.workers.algorithms.masking import at_least_float32
from rlinf.workers.algorithms.parts import KlKind

__all__ = ["LIMIT", "KlKind", "clamped", "kl"]

LIMIT = 5.0
"""Beyond d = LIMIT k3 goes on along its tangent: its value stays finite, and a token that lies far
from the reference keeps a gradient, exp(LIMIT) - 1 at most, that pulls it back."""

_SERIES_BELOW = 1e-2


def kl(logprobs: Tensor, reference: Tensor, kind: KlKind = "k2") -> Tensor:
    """The estimate for each token, float32 or float64, in the shape of the inputs.

    `reference` gets no gradient. Values at positions that do not count may be anything; mask after.
    """
    d = at_least_float32(reference.detach()) - at_least_float32(logprobs)
    if kind == "k1":
        return -d
    squared = 0.5 * d.square()
    if kind == "k2":
        return squared
    if kind == "k3":
        return _k3(d)
    shown = -d if kind == "k1+" else _k3(d)
    return squared - squared.detach() + shown.detach()


def clamped(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Which tokens k3 treats by its tangent (a metric: they should be rare)."""
    return at_least_float32(reference - logprobs).detach() > LIMIT


def _k3(d: Tensor) -> Tensor:
    near = d.clamp(max=LIMIT)
    # exp(d) - 1 - d cancels to noise, and to less than 0, near 0: a series is exact there.
    small = near.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    series = small.square() * (0.5 + small / 6 + small.square() / 24)
    exact = torch.where(near.abs() < _SERIES_BELOW, series, torch.expm1(near) - near)
    slope = torch.expm1(torch.tensor(LIMIT)).item()
    return exact + slope * (d - near)

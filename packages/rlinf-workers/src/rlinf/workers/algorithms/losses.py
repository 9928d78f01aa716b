"""Policy and value losses of each token, and their reduction to sums that can be added up.

A loss is a matrix [rows, T]; `reduce` turns it into an un-normalised sum and the weight that
belongs to it. Sums and weights of micro-batches and of ranks are added, and the gradient of the
summed loss is divided once by the summed weight. So it does not depend on how the batch was cut.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.workers.algorithms.masking import as_mask, at_least_float32, masked_mean, masked_sum
from rlinf.workers.algorithms.parts import Clip, Normalisation

__all__ = [
    "Clip",
    "Normalisation",
    "PolicyLoss",
    "cispo",
    "gspo",
    "importance_weights",
    "ppo_clip",
    "ppo_slope",
    "reduce",
    "value_loss",
    "value_slope",
]

MAX_LOG_RATIO = 20.0
LARGEST_RATIO = 0.999 * math.exp(MAX_LOG_RATIO)
"""Where the bound on the log ratio has cut the gradient, to rounding."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss [rows, T] and what there is to know about it.

    Attributes:
        loss: Loss of each token; anything at masked positions.
        ratio: New over old probability of each token (of the sequence, for GSPO), detached.
        clipped: Where the clip cut the gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def reduce(loss: Tensor, mask: Tensor, normalisation: Normalisation) -> tuple[Tensor, Tensor]:
    """The un-normalised sum of `loss` over `mask` (it has the gradient) and its weight (float64).

    The loss of a batch is the sum of the sums divided by the sum of the weights, over however many
    parts it was cut into. With `sequence`, rows that are masked throughout are no rows. Raises
    `ValueError` for `constant` without its number.
    """
    kept = as_mask(mask)
    tokens = kept.sum(1)
    if normalisation.kind == "sequence":
        return masked_mean(loss, kept, 1).sum(), (tokens > 0).sum().double()
    total = masked_sum(loss, kept)
    if normalisation.kind == "token":
        return total, tokens.sum().double()
    if normalisation.constant is None:
        raise ValueError(f"{normalisation}: the constant to divide by is missing")
    return total / normalisation.constant, tokens.new_tensor(len(tokens)).double()


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip | None = None
) -> PolicyLoss:
    """-min(r A, clip(r) A), r = exp(logprobs - old).

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7. `advantages` broadcasts: [rows,
    T], or [rows, 1] for one advantage a response.
    """
    return _clipped(_log_ratio(logprobs, old).exp(), advantages, clip or Clip())


def ppo_slope(loss: PolicyLoss) -> Tensor:
    """The slope of `ppo_clip` by the log-probs, in closed form.

    d(-r A) / d log p = -r A: where nothing was cut the slope is the loss itself.
    """
    cut = loss.clipped | (loss.ratio >= LARGEST_RATIO)
    return torch.where(cut, 0, loss.loss)


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: Clip | None = None
) -> PolicyLoss:
    """PPO clip on the ratio of the whole response, its length's root, token by token.

    Source: GSPO-token, Zheng et al. 2025, arXiv:2507.18071, equations 7 and 14: the value of the
    ratio is exp(mean of log r over the response), its gradient that of each token's own log-prob.
    Meant for `Normalisation("sequence")`; typical clips are a thousand times smaller than PPO's.
    """
    kept = as_mask(mask)
    mean = masked_mean(_log_ratio(logprobs, old), kept, 1).detach()
    own = torch.where(kept, logprobs - logprobs.detach(), 0)
    return _clipped((mean[:, None] + own).exp(), advantages, clip or Clip(3e-4, 4e-4))


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip | None = None
) -> PolicyLoss:
    """-clip(r) A log p with the clipped ratio as a constant: no token loses its gradient.

    Source: CISPO, MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5.
    """
    bounds = clip or Clip(1.0, 0.28)
    ratio = _log_ratio(logprobs, old).exp().detach()
    weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    return PolicyLoss(-weight * advantages * logprobs, ratio, weight != ratio)


def importance_weights(trainer: Tensor, rollout: Tensor, cap: float = 2.0) -> Tensor:
    """min(p_trainer / p_rollout, cap) of each token, detached: multiply the loss with it.

    Corrects for a rollout engine whose log-probs differ from the trainer's for the same weights.
    Source: truncated importance sampling, Ionides 2008, in the form of Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training". Both sides must be of the
    same kind (full distribution at the same temperature).
    """
    return _log_ratio(trainer, rollout).exp().clamp(max=cap).detach()


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None = None) -> Tensor:
    """Half the squared error of each value; with `clip`, the worse of it and the clipped one.

    Source: the value clipping of openai/baselines ppo2: values may move `clip` away from `old`.
    """
    error = (values - targets).square()
    if clip is None:
        return 0.5 * error
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum(error, (near - targets).square())


def value_slope(values: Tensor, old: Tensor, targets: Tensor, clip: float | None = None) -> Tensor:
    """The slope of `value_loss` by the values, in closed form."""
    error = values - targets
    if clip is None:
        return error
    moved = values - old
    near = old + moved.clamp(-clip, clip) - targets
    return torch.where((moved.abs() > clip) & (near.abs() > error.abs()), 0, error)


def _log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    # exp of a larger difference overflows, and an infinite ratio has a NaN gradient even where the
    # clipped branch is taken.
    difference = at_least_float32(logprobs) - at_least_float32(old.detach())
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> PolicyLoss:
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss = torch.maximum(free, bounded)
    cut = bounded > free
    if clip.dual is not None:
        roof = -clip.dual * advantages
        over = (advantages < 0) & (loss > roof)
        loss = torch.where(over, roof, loss)
        cut = cut | over
    return PolicyLoss(loss, ratio.detach(), cut)

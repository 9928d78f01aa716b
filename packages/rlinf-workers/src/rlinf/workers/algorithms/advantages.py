"""Advantages of sampled responses and of environment steps.

Groups: `rewards` [..., n] are the rewards of the n samples of one prompt, `scored` (same shape)
says which of them have a reward at all; the others neither count nor get an advantage. A group
whose rewards are all equal, or with fewer than two scored samples, has the advantage exactly 0.

Tokens: `rewards`, `values` and `mask` are [rows, T]; positions outside the mask (prompt, padding,
text that a tool returned) are not steps at all: discounting and bootstrapping skip them, and the
result does not change when masked positions are inserted. Results are 0 there.
"""

import logging

import torch
from torch import Tensor

from rlinf.workers.algorithms.masking import as_mask, masked_whiten

__all__ = [
    "gae",
    "gae_stream",
    "grpo",
    "leave_one_out",
    "reinforce_plus_plus",
    "returns",
    "settle_rewards",
]

_log = logging.getLogger(__name__)


def grpo(
    rewards: Tensor, scored: Tensor | None = None, *, scale: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """(R - mean) / (std + epsilon) within each group, with the unbiased standard deviation.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. With `scale` false it is the
    advantage of Dr. GRPO, R - mean: Liu et al. 2025, arXiv:2503.20783, section 3.2.
    Computed in float64, returned in the dtype of `rewards`.
    """
    centred, kept, count = _centred(rewards, scored)
    if scale:
        variance = centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + epsilon)
    return torch.where(kept, centred, 0).to(rewards.dtype)


def leave_one_out(rewards: Tensor, scored: Tensor | None = None) -> Tensor:
    """R minus the mean reward of the *other* samples of the group.

    Source: RLOO, Ahmadian et al. 2024, arXiv:2402.14740, equation 8. There is no division by a
    standard deviation: that of the other samples is 0 as soon as they agree.
    """
    centred, kept, count = _centred(rewards, scored)
    return torch.where(kept, centred * (count / (count - 1).clamp(min=1)), 0).to(rewards.dtype)


def _centred(rewards: Tensor, scored: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """R - mean in float64 (exactly 0 for equal rewards), who counts, and how many do a group."""
    kept = torch.ones_like(rewards, dtype=torch.bool) if scored is None else as_mask(scored)
    exact = torch.where(kept, rewards, 0).double()
    count = kept.sum(-1, keepdim=True)
    alone = int((count < 2).sum())
    if alone:
        _log.warning("%d groups have fewer than two scored samples: their advantage is 0", alone)
    mean = exact.sum(-1, keepdim=True) / count.clamp(min=1)
    high = rewards.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
    low = rewards.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    differs = kept & (high > low)
    return torch.where(differs, exact - mean, 0), kept, count


def settle_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward that lies on a masked position to the nearest trainable one before it.

    Rewards before the first trainable position go to that one. So no reward is lost when the last
    token of a row (an end token, a tool's answer) is not trained on. The rewards of a row without
    a trainable position are dropped with it.
    """
    kept = as_mask(mask)
    length = rewards.shape[1]
    here = torch.arange(length, device=rewards.device).expand_as(kept)
    before = torch.where(kept, here, -1).cummax(1).values
    first = torch.where(kept, here, length).amin(1, keepdim=True)
    target = torch.where(before < 0, first, before).clamp(max=length - 1)
    settled = torch.zeros_like(rewards).scatter_add(1, target, rewards)
    return torch.where(kept, settled, 0)


def returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each trainable token on, one factor a trainable token."""
    kept = as_mask(mask)
    settled = settle_rewards(rewards, kept)
    result = torch.zeros_like(settled)
    carry = settled.new_zeros(len(settled))
    for t in reversed(range(settled.shape[1])):
        carry = torch.where(kept[:, t], settled[:, t] + gamma * carry, carry)
        result[:, t] = carry
    return torch.where(kept, result, 0)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Returns of each token, whitened over all trainable tokens of the batch.

    Source: REINFORCE++, Hu 2025, arXiv:2501.03262, section 3. The KL penalty, where one is used,
    is part of `rewards`. Whiten over the whole batch, not over a micro-batch.
    """
    return masked_whiten(returns(rewards, mask, gamma), mask)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimate of each trainable token, and the value targets A + V.

    Source: Schulman et al. 2015, arXiv:1506.02438, equation 16. `bootstrap` [rows] is the value of
    the state after the last trainable token of a row that was cut off (truncated); leave it out, or
    0, for a row that ended by itself. Not whitened; see `masked_whiten`.
    """
    kept = as_mask(mask)
    settled = settle_rewards(rewards, kept)
    known = torch.where(kept, values, 0)
    result = torch.zeros_like(settled)
    after = settled.new_zeros(len(settled)) if bootstrap is None else bootstrap.to(settled.dtype)
    carry = settled.new_zeros(len(settled))
    for t in reversed(range(settled.shape[1])):
        here = kept[:, t]
        delta = settled[:, t] + gamma * after - known[:, t]
        carry = torch.where(here, delta + gamma * lam * carry, carry)
        after = torch.where(here, known[:, t], after)
        result[:, t] = carry
    result = torch.where(kept, result, 0)
    return result, result + known


def gae_stream(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    ends: tuple[Tensor, Tensor],
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets of environments that reset themselves, time first: [T, envs].

    Source: Schulman et al. 2015, arXiv:1506.02438, with the two kinds of end kept apart as in Pardo
    et al. 2018, arXiv:1712.00378. `ends` is (terminated, truncated). `next_values[t]` is the value
    of the observation that step t itself led to: at an end this is the *final* observation of the
    old episode, not the first of the new one. Termination does not bootstrap, truncation does, and
    nothing flows back over either.
    """
    terminated, truncated = (as_mask(end) for end in ends)
    delta = rewards + gamma * torch.where(terminated, 0, next_values) - values
    over = terminated | truncated
    result = torch.zeros_like(delta)
    carry = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        carry = delta[t] + gamma * lam * torch.where(over[t], 0, carry)
        result[t] = carry
    return result, result + values

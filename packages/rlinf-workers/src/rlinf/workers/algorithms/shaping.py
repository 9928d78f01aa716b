"""What is done to rewards and to the choice of prompts before advantages are computed."""

import torch
from torch import Tensor

from rlinf.workers.algorithms.masking import as_mask
from rlinf.workers.algorithms.parts import DynamicSampling, Overlong

__all__ = ["DynamicSampling", "Overlong", "informative", "overlong_penalty"]


def overlong_penalty(lengths: Tensor, limit: int, overlong: Overlong) -> Tensor:
    """What to add to the rewards of responses with `lengths` tokens, float64, never above 0.

    Source: the soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.
    Raises `ValueError` when the buffer is longer than `limit`.
    """
    if overlong.buffer > limit:
        raise ValueError(f"a buffer of {overlong.buffer} tokens in a limit of {limit}")
    over = lengths.double() - (limit - overlong.buffer)
    return -overlong.penalty * (over / overlong.buffer).clamp(0, 1)


def informative(rewards: Tensor, scored: Tensor | None = None) -> Tensor:
    """Which groups have two different rewards, bool [...] for `rewards` [..., n].

    Only those have a gradient. Source: dynamic sampling of DAPO, equation 11.
    """
    kept = torch.ones_like(rewards, dtype=torch.bool) if scored is None else as_mask(scored)
    high = rewards.masked_fill(~kept, -torch.inf).amax(-1)
    low = rewards.masked_fill(~kept, torch.inf).amin(-1)
    return high > low

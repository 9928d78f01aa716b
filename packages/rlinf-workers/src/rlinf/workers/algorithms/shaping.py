"""What is done to rewards and to the choice of prompts before advantages are computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.workers.algorithms.masking import as_mask

__all__ = ["DynamicSampling", "Overlong", "informative", "overlong_penalty"]


@dataclass(frozen=True, slots=True)
class Overlong:
    """The penalty of responses that come close to the longest allowed.

    Attributes:
        buffer: Tokens before the limit over which the penalty grows from 0.
        penalty: What is taken off at the limit and beyond.
    """

    buffer: int = 4096
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.penalty < 0:
            raise ValueError(f"{self}: the buffer is at least 1, the penalty at least 0")


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


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Sample on until a step has enough groups to learn from, but not for ever.

    Source: DAPO, section 3.2. A further round asks for as many groups as are lacking. Nothing
    sampled is thrown away.

    Attributes:
        groups: Informative groups that a step wants.
        rounds: After so many rounds of sampling it makes do with what there is.
    """

    groups: int = 0
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.groups < 0 or self.rounds < 1:
            raise ValueError(f"{self}: groups is at least 0, rounds at least 1")

    def lacking(self, found: int, rounds: int) -> int:
        """Groups to sample after `rounds` rounds that found so many informative ones; 0: none."""
        return max(0, self.groups - found) if rounds < self.rounds else 0

"""The losses of a minibatch, and which way each answer of the policy should move.

The slopes of PPO's losses are written out, so autograd records the policy alone: with a small one
the rest would be most of an update.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.workers.algorithms.losses import (
    PolicyLoss,
    ppo_clip,
    ppo_slope,
    value_loss,
    value_slope,
)
from rlinf.workers.engines.policy_learning import PolicyTrainerConfig
from rlinf.workers.engines.trajectory_batch import Flat
from rlinf.workers.roles.policy import Evaluation

__all__ = ["Slopes", "slopes"]


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """Of B decisions.

    Attributes:
        policy: Loss, ratio and clip of each.
        sums: Of the policy loss, the value loss and the entropy, [3], shares of the minibatch.
        answers: Those of the minibatch's loss by log-probs, entropies and values, each [B]; None
            where it does not depend on them.
    """

    policy: PolicyLoss
    sums: Tensor
    answers: tuple[Tensor, Tensor | None, Tensor | None]


@torch.no_grad()
def slopes(
    found: Evaluation, part: Flat, advantages: Tensor, count: int, config: PolicyTrainerConfig
) -> Slopes:
    """Of the mean loss over a minibatch of `count` decisions, of which `part` may be a share."""
    policy = ppo_clip(found.logprobs, part.logprobs, advantages, config.clip)
    losses, by_value, by_entropy = policy.loss.new_zeros(()), None, None
    if config.advantage == "gae":
        given = (found.values, part.values, part.targets, config.value_clip)
        losses = value_loss(*given).sum()
        by_value = value_slope(*given) * (2 * config.value_coefficient / count)
    if config.entropy_coefficient:
        by_entropy = found.entropy.new_full((len(part),), -config.entropy_coefficient / count)
    sums = torch.stack([policy.loss.sum(), losses, found.entropy.sum()]) / count
    return Slopes(policy, sums, (ppo_slope(policy) / count, by_entropy, by_value))

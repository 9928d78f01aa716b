"""How a policy that acts learns, and what is told of an iteration of it."""

import math
from dataclasses import dataclass, field
from typing import Literal

from rlinf.workers.algorithms.losses import Clip
from rlinf.workers.bounds import Count, NonNegative, Positive, Share
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.vision_tower import VisionConfig

__all__ = ["PolicyStats", "PolicyTrainerConfig"]


@dataclass(frozen=True, slots=True)
class PolicyTrainerConfig:
    """How a policy learns.

    Attributes:
        optimiser: AdamW's settings; a minibatch is one of its steps.
        advantage: `gae`, with the policy's value; or `grpo` over episodes with the same seed.
        by_success: With grpo: an episode's reward is 1 for a success, not the sum of its rewards.
        gamma: Discount of a later reward, a decision.
        lam: How far advantages trust later rewards (1) over the next value (0).
        epochs: Passes over the decisions of an iteration.
        minibatch: Decisions of an optimiser step.
        clip: Of the ratio of probabilities.
        value_coefficient: Weight of the value loss.
        value_clip: How far values may move from what they were; None: no bound.
        entropy_coefficient: Weight of the entropy, which is made larger.
        normalise: Whether advantages are whitened within a minibatch (gae only).
        target_kl: No further pass once the policy has moved so far; 0: no bound.
        rows: Observations that are evaluated at once where no gradient is needed.
        vision: How the vision tower learns, where the policy has one.
        seed: Of the minibatches.
    """

    optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(lr=3e-4, warmup_steps=0, beta2=0.999, clip_norm=0.5)
    )
    advantage: Literal["gae", "grpo"] = "gae"
    by_success: bool = False
    gamma: Share = 0.99
    lam: Share = 0.95
    epochs: Count = 10
    minibatch: Count = 64
    clip: Clip = field(default_factory=Clip)
    value_coefficient: NonNegative = 0.5
    value_clip: Positive | None = None
    entropy_coefficient: NonNegative = 0.0
    normalise: bool = True
    target_kl: NonNegative = 0.0
    rows: Count = 8192
    vision: VisionConfig = field(default_factory=VisionConfig)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """One iteration of learning.

    Attributes:
        version: Of the weights after it.
        steps: Actions that were carried out.
        decisions: That were learnt from.
        episodes: That ended.
        lost: Episodes whose process was lost.
        staleness: Largest number of iterations that the weights which acted were behind.
        reward: Mean return of the last 20 episodes that ended; nan before the first.
        success: Share of successes among the same.
        updates: Optimiser steps.
        policy_loss: Mean over them, as the three below.
        value_loss: See `policy_loss`.
        entropy: See `policy_loss`.
        grad_norm: See `policy_loss`.
        kl: Mean k3 estimate of KL(old || new) in the last pass.
        clipped: Share of decisions in the last pass whose gradient was cut.
        explained: 1 - mean squared error / variance of the value targets, before learning.
    """

    version: int
    steps: int
    decisions: int
    episodes: int
    lost: int
    staleness: int
    reward: float
    success: float
    updates: int
    policy_loss: float
    value_loss: float
    entropy: float
    grad_norm: float
    kl: float
    clipped: float
    explained: float

    def metrics(self) -> dict[str, float]:
        """The iteration as numbers by name; there is no reward before an episode has ended."""
        numbers = {name: float(getattr(self, name)) for name in self.__slots__}
        numbers["env_steps"] = numbers.pop("steps")
        return {name: value for name, value in numbers.items() if not math.isnan(value)}

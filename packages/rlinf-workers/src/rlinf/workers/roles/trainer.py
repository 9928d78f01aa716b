"""Trainer: scored groups in, in parts of any size; one optimiser step once all are there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlinf.workers.roles.episode import EpisodeStats
from rlinf.workers.roles.residency import Residency
from rlinf.workers.roles.reward import ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf.workers.shards import Shard

__all__ = ["PartialStats", "StepStats", "TrainerEngine"]


@dataclass(frozen=True, slots=True)
class PartialStats:
    """Sums over some of a step's samples; add them to get those of the whole step.

    Attributes:
        loss: Un-normalised policy loss.
        weight: What the loss and its gradient are to be divided by.
        reward: Rewards of the scored samples.
        scored: Samples that have a reward.
        unscored: Samples that have none.
        format_errors: Scored samples without a readable answer.
        informative: Groups whose scored rewards differ.
        rows: Samples that were trained on.
        dropped: Samples left out because their advantage is 0.
        stale: Samples left out because their weights were too old; `dropped` has them too.
        tokens: Response tokens of all samples, without what tools wrote.
        trained_tokens: Response tokens of the samples that were trained on.
        mixed: Samples whose tokens were drawn with more than one version of the weights.
        clipped: Tokens whose gradient was cut.
        truncated: Tokens whose importance weight was above its cap.
        kl: k3 estimate of KL(rollout || trainer before the step), summed over trained tokens.
        ratio_deviation: Largest |ratio - 1| of a trained token (a maximum, not a sum).
        staleness: Largest number of versions a sample's weights were behind (a maximum).
        episodes: What there is to say of episodes.
    """

    loss: float = 0.0
    weight: float = 0.0
    reward: float = 0.0
    scored: int = 0
    unscored: int = 0
    format_errors: int = 0
    informative: int = 0
    rows: int = 0
    dropped: int = 0
    stale: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    mixed: int = 0
    clipped: int = 0
    truncated: int = 0
    kl: float = 0.0
    ratio_deviation: float = 0.0
    staleness: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)

    def __add__(self, other: "PartialStats") -> "PartialStats":
        merged: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)
        }
        for name in ("ratio_deviation", "staleness"):
            merged[name] = max(getattr(self, name), getattr(other, name))
        return PartialStats(**merged)


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimiser step.

    Attributes:
        version: Version of the weights after it.
        stepped: False when there was nothing to learn from (the gradient was 0), or when only
            the critic learns: no parameter has moved, and the version is the old one.
        lr: Learning rate of the step.
        grad_norm: Norm of the normalised gradient before it was clipped.
        parts: The sums it was made of.
    """

    version: int
    stepped: bool
    lr: float
    grad_norm: float
    parts: PartialStats

    def metrics(self) -> dict[str, float]:
        """The step as numbers by name; means are 0 where nothing was counted."""
        parts = self.parts
        trained = max(parts.trained_tokens, 1)
        return (
            {
                "reward": parts.reward / max(parts.scored, 1),
                "loss": parts.loss / parts.weight if parts.weight else 0.0,
                "grad_norm": self.grad_norm if math.isfinite(self.grad_norm) else 0.0,
                "lr": self.lr,
                "version": float(self.version),
                "clip_fraction": parts.clipped / trained,
                "kl_rollout": parts.kl / trained,
                "length": parts.tokens / max(parts.scored + parts.unscored, 1),
            }
            | {
                name: float(value)
                for name, value in asdict(parts).items()
                if name not in ("loss", "weight", "reward", "clipped", "kl", "episodes")
            }
            | parts.episodes.metrics()
        )


@runtime_checkable
class TrainerEngine(Residency, Protocol):
    """Learns from scored groups. The result does not depend on how they were cut into calls."""

    @property
    def version(self) -> int:
        """Number of optimiser steps that have changed the weights."""

    def accumulate(self, groups: Sequence[ScoredGroup]) -> PartialStats:
        """Add the gradient of these groups to the step's; changes no parameter."""

    def end_round(self) -> int:
        """Note that a round of sampling has ended; groups that are still wanted, 0: enough."""

    def finish_step(self) -> StepStats:
        """Normalise and clip the gradient, step, and begin the next step."""

    def state(self) -> Mapping[str, "Tensor | Shard"]:
        """The parameters by name, as they are now (not copies): what is published.

        Of several ranks each gives what it has to hand out, tensors or boxes of them; together that
        is every element once.
        """

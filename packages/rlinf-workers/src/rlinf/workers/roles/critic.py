"""Critic: scored groups in, the same groups with an advantage for each token out; it learns too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlinf.workers.roles.residency import Residency
from rlinf.workers.roles.reward import ScoredGroup

__all__ = ["CriticEngine", "CriticStats"]


@dataclass(frozen=True, slots=True)
class CriticStats:
    """One optimiser step of the critic.

    Attributes:
        loss: Mean value loss of a token before the step.
        grad_norm: Norm of the gradient before it was clipped.
        value: Mean value of a token before the step.
        explained: 1 - mean squared error / variance of the targets; 0 where they do not vary.
        tokens: Tokens it learnt from.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    value: float = 0.0
    explained: float = 0.0
    tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """The step as numbers by name."""
        return {
            "value_loss": self.loss,
            "value_grad_norm": self.grad_norm,
            "value": self.value,
            "explained_variance": self.explained,
        }


@runtime_checkable
class CriticEngine(Residency, Protocol):
    """Values of states. The result does not depend on how groups were cut into calls."""

    def estimate(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups, in order, with `advantages` [n, T] of the values before the step.

        The gradient of the value loss is added to the step's; no parameter changes.
        """

    def finish_step(self) -> CriticStats:
        """Normalise and clip the gradient, step, and begin the next step."""

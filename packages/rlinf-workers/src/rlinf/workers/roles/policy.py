"""Policy: what learns from trajectories. One forward gives log-probs, entropy and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlinf.workers.roles.simulator import Actor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Evaluation", "Policy"]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Of B decisions, each [B]. Autograd has recorded them, or `backward` is written out.

    Attributes:
        logprobs: Of each choice as a whole.
        entropy: Of the distribution it came from.
        values: Of what was shown before it.
    """

    logprobs: "Tensor"
    entropy: "Tensor"
    values: "Tensor"

    def backward(
        self, logprobs: "Tensor", entropy: "Tensor | None", values: "Tensor | None"
    ) -> None:
        """Add to the gradients of the weights, by the slopes of a loss, each [B]; None: of 0."""
        import torch

        pairs = ((self.logprobs, logprobs), (self.entropy, entropy), (self.values, values))
        learnt = [(answer, slope.to(answer.dtype)) for answer, slope in pairs if slope is not None]
        torch.autograd.backward([a for a, _ in learnt], [s for _, s in learnt])


class Policy(Protocol):
    """A `torch.nn.Module` that a `PolicyTrainer` trains."""

    def evaluate(self, observations: "Mapping[str, Tensor]", choices: "Tensor") -> Evaluation:
        """Evaluate choices that an actor made; observations by name, [B, ...]."""

    def values(self, observations: "Mapping[str, Tensor]") -> "Tensor":
        """The value of what is shown, [B]."""

    def actor(self) -> Actor:
        """What acts by these weights; a light one has copies, any other follows them."""

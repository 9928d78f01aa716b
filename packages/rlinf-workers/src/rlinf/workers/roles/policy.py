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
    """Of B decisions, each [B] with a gradient.

    Attributes:
        logprobs: Of each choice as a whole.
        entropy: Of the distribution it came from.
        values: Of what was shown before it.
    """

    logprobs: "Tensor"
    entropy: "Tensor"
    values: "Tensor"


class Policy(Protocol):
    """A `torch.nn.Module` that a `PolicyTrainer` trains."""

    def evaluate(self, observations: "Mapping[str, Tensor]", choices: "Tensor") -> Evaluation:
        """Evaluate choices that an actor made; observations by name, [B, ...]."""

    def values(self, observations: "Mapping[str, Tensor]") -> "Tensor":
        """The value of what is shown, [B]."""

    def actor(self) -> Actor:
        """What acts by these weights; a light one has copies, any other follows them."""

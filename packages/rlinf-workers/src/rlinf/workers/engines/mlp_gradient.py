"""What an `MlpPolicy` answers, and its gradient, over one vector of weights.

On matrices as small as these, recording an operation costs autograd more than the operation does.
So both directions are written out, and autograd takes no part.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.roles.policy import Evaluation

__all__ = ["Bins", "Gaussian", "Layout", "TanhNetwork", "WrittenOut", "evaluate"]

LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
Layer = tuple[Tensor, Tensor]
"""A matrix [in, out] and an offset [out]."""


class TanhNetwork:
    """Dense layers of these widths with tanh between them, weights `begin` to `end` of a vector."""

    def __init__(self, widths: Sequence[int], begin: int = 0) -> None:
        self._shapes = list(itertools.pairwise(widths))
        self._sizes = [size for rows, columns in self._shapes for size in (rows * columns, columns)]
        self.begin, self.end = begin, begin + sum(self._sizes)

    def layers(self, vector: Tensor) -> list[Layer]:
        """Views of its layers."""
        parts = torch.split(vector[self.begin : self.end], self._sizes)
        pairs = zip(parts[::2], parts[1::2], self._shapes, strict=True)
        return [(matrix.view(shape), offset) for matrix, offset, shape in pairs]

    def forward(self, layers: Sequence[Layer], states: Tensor) -> list[Tensor]:
        """What goes into each layer, the states [B, in] first; in the end the answers [B, out]."""
        found = [states]
        for matrix, offset in layers:
            if len(found) > 1:
                _tanh_(found[-1])
            found.append(torch.addmm(offset, found[-1], matrix))
        return found

    def backward(
        self, layers: Sequence[Layer], found: Sequence[Tensor], slope: Tensor
    ) -> list[Tensor]:
        """The slopes of its weights in order, by that of the answers, [B, out]."""
        parts: list[Tensor] = []
        for index in reversed(range(len(layers))):
            entered = found[index]
            parts[:0] = [entered.T @ slope, slope.sum(0)]
            if index:
                slope = torch.ops.aten.tanh_backward(slope @ layers[index][0].T, entered)
        return parts


def _tanh_(x: Tensor) -> None:
    """In place; on a CPU numpy's is several times as quick as torch's."""
    if x.device.type == "cpu":
        np.tanh(x.numpy(), out=x.numpy())
    else:
        x.tanh_()


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Answers [B, A] are means; the logs of the deviations are weights `begin` to `begin + A`."""

    begin: int
    weights: int

    def forward(self, answer: Tensor, vector: Tensor, choices: Tensor) -> tuple[Tensor, ...]:
        """Log-probs [B] and entropies [B]; and what `backward` wants."""
        log_std = vector[self.begin : self.begin + self.weights]
        narrow = torch.exp(-log_std)
        drawn = (choices - answer) * narrow
        offset = (log_std + LOG_ROOT_TWO_PI).sum()
        logprobs = drawn.square().sum(1).mul_(-0.5).sub_(offset)
        return logprobs, (offset + 0.5 * self.weights).expand(len(answer)), drawn, narrow

    def backward(
        self, kept: Sequence[Tensor], logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The slopes of the answers [B, A] and of its weights, by those of what it found."""
        drawn, narrow = kept
        sloped = logprobs[:, None] * drawn
        own = (sloped * drawn).sum(0) - logprobs.sum()
        return sloped * narrow, own if entropy is None else own + entropy.sum()


@dataclass(frozen=True, slots=True)
class Bins:
    """Answers [B, A * bins] are logits; choices [B, A] say which."""

    bins: int
    weights: int = 0

    def forward(self, answer: Tensor, vector: Tensor, choices: Tensor) -> tuple[Tensor, ...]:
        """See `Gaussian.forward`."""
        logs = answer.view(len(answer), -1, self.bins).log_softmax(-1)
        mass, places = logs.exp(), choices.long()[..., None]
        spread = -(mass * logs).sum(2, keepdim=True)
        logprobs = logs.gather(2, places)[..., 0].sum(1)
        return logprobs, spread.sum((1, 2)), logs, mass, places, spread

    def backward(
        self, kept: Sequence[Tensor], logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Gaussian.backward`."""
        logs, mass, places, spread = kept
        wide = logprobs[:, None, None]
        slope = (-wide * mass).scatter_add_(2, places, wide.expand_as(places))
        if entropy is not None:
            slope -= entropy[:, None, None] * mass * (logs + spread)
        return slope.flatten(1), slope.new_zeros(0)


@dataclass(frozen=True, slots=True)
class Layout:
    """Who has which of the weights, in this order."""

    actor: TanhNetwork
    head: Gaussian | Bins
    critic: TanhNetwork


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOut(Evaluation):
    """With what its `backward` needs.

    Attributes:
        layout: Of the weights.
        weights: They get the gradient.
        layers: Of the actor, and of the critic.
        found: What went through each.
        kept: By the head.
    """

    layout: Layout
    weights: nn.Parameter
    layers: tuple[list[Layer], list[Layer]]
    found: tuple[list[Tensor], list[Tensor]]
    kept: Sequence[Tensor]

    def backward(self, logprobs: Tensor, entropy: Tensor | None, values: Tensor | None) -> None:
        """See `Evaluation`."""
        layout, (actor, critic), (acted, valued) = self.layout, self.layers, self.found
        by_answer, by_head = layout.head.backward(self.kept, logprobs, entropy)
        parts = [*layout.actor.backward(actor, acted, by_answer), by_head]
        if values is not None:
            parts += layout.critic.backward(critic, valued, values[:, None])
        gradient = torch.cat([part.flatten() for part in parts])
        if self.weights.grad is None:
            self.weights.grad = torch.zeros_like(self.weights)
        self.weights.grad[: len(gradient)] += gradient


@torch.no_grad()
def evaluate(layout: Layout, weights: nn.Parameter, states: Tensor, choices: Tensor) -> WrittenOut:
    """See `Policy.evaluate`; states [B, S]."""
    vector = weights.detach()
    layers = layout.actor.layers(vector), layout.critic.layers(vector)
    found = layout.actor.forward(layers[0], states), layout.critic.forward(layers[1], states)
    logprobs, entropy, *kept = layout.head.forward(found[0][-1], vector, choices)
    values = found[1][-1][:, 0]
    return WrittenOut(logprobs, entropy, values, layout, weights, layers, found, kept)

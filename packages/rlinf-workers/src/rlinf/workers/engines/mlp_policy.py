"""A small policy with a value: two tanh networks over a state vector."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.bounds import NonNegative
from rlinf.workers.engines.mlp_actor import MlpActor, MlpSizes, flatten
from rlinf.workers.roles.policy import Evaluation

__all__ = ["MlpPolicy", "MlpStart"]


@dataclass(frozen=True, slots=True)
class MlpStart:
    """How a policy begins.

    Attributes:
        seed: Of the orthogonal weights.
        std: Standard deviation of its Gaussian.
    """

    seed: int = 0
    std: NonNegative = 1.0


class MlpPolicy(nn.Module):
    """A `Policy` whose actor is light."""

    def __init__(self, sizes: MlpSizes, start: MlpStart | None = None) -> None:
        super().__init__()
        start = start or MlpStart()
        self.sizes = sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start.seed)
            self.actor_net = _network(sizes, sizes.outputs, 0.01)
            self.critic_net = _network(sizes, 1, 1.0)
        if not sizes.bins:
            self.log_std = nn.Parameter(torch.full((len(sizes.low),), math.log(start.std)))

    def evaluate(self, observations: Mapping[str, Tensor], choices: Tensor) -> Evaluation:
        """See `Policy`."""
        states = observations["state"]
        answer = self.actor_net(states)
        values = self.critic_net(states)[:, 0]
        if self.sizes.bins:
            logits = answer.view(len(states), -1, self.sizes.bins).log_softmax(-1)
            logprobs = logits.gather(-1, choices.long()[..., None])[..., 0].sum(1)
            return Evaluation(logprobs, -(logits.exp() * logits).sum((1, 2)), values)
        offset = (0.5 * math.log(2 * math.pi) + self.log_std).sum()
        drawn = (choices - answer) * torch.exp(-self.log_std)
        entropy = (offset + 0.5 * len(self.log_std)).expand(len(states))
        return Evaluation(-0.5 * drawn.square().sum(1) - offset, entropy, values)

    def values(self, observations: Mapping[str, Tensor]) -> Tensor:
        """See `Policy`."""
        values: Tensor = self.critic_net(observations["state"])[:, 0]
        return values

    def actor(self) -> MlpActor:
        """See `Policy`; it has copies of the weights as they are now."""
        return MlpActor(self.sizes, flatten(self._actor_weights()))

    def _actor_weights(self) -> "list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]":
        layers = [m for m in self.actor_net if isinstance(m, nn.Linear)]
        found = [t for m in layers for t in (m.weight.detach().T, m.bias.detach())]
        found += [] if self.sizes.bins else [self.log_std.detach()]
        return [t.cpu().numpy() for t in found]


def _network(sizes: MlpSizes, outputs: int, gain: float) -> nn.Sequential:
    widths = [sizes.inputs, *sizes.hidden]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [_linear(a, b, math.sqrt(2)), _Tanh()]
    return nn.Sequential(*layers, _linear(widths[-1], outputs, gain))


class _Tanh(nn.Module):
    """By the logistic function: on a CPU five times quicker than torch.tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(2 * x) - 1


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer

"""A small policy with a value: two tanh networks over a state vector."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlinf.workers.bounds import Positive
from rlinf.workers.engines.mlp_actor import MlpActor, MlpSizes
from rlinf.workers.engines.mlp_gradient import Bins, Gaussian, Layout, TanhNetwork, evaluate
from rlinf.workers.random_state import seeded
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
    std: Positive = 1.0


class MlpPolicy(nn.Module):
    """A `Policy` whose actor is light.

    Attributes:
        weights: The actor's as `MlpSizes.shapes` has them, then the critic's.
    """

    def __init__(self, sizes: MlpSizes, start: MlpStart | None = None) -> None:
        super().__init__()
        start = start or MlpStart()
        self.sizes = sizes
        widths = [sizes.inputs, *sizes.hidden]
        actor = TanhNetwork([*widths, sizes.outputs])
        head = Bins(sizes.bins) if sizes.bins else Gaussian(actor.end, len(sizes.low))
        critic = TanhNetwork([*widths, 1], actor.end + head.weights)
        self._layout = Layout(actor, head, critic)
        with seeded(start.seed):
            drawn = [_orthogonal(widths, sizes.outputs, 0.01), _orthogonal(widths, 1, 1.0)]
        log_std = torch.full((head.weights,), math.log(start.std))
        self.weights = nn.Parameter(torch.cat([drawn[0], log_std, drawn[1]]))

    def evaluate(self, observations: Mapping[str, Tensor], choices: Tensor) -> Evaluation:
        """See `Policy`."""
        return evaluate(self._layout, self.weights, observations["state"], choices)

    @torch.no_grad()
    def values(self, observations: Mapping[str, Tensor]) -> Tensor:
        """See `Policy`."""
        critic = self._layout.critic
        return critic.forward(critic.layers(self.weights.detach()), observations["state"])[-1][:, 0]

    def actor(self) -> MlpActor:
        """See `Policy`; it has copies of the weights as they are now."""
        own = self.weights[: self._layout.critic.begin]
        return MlpActor(self.sizes, own.detach().cpu().numpy())


def _orthogonal(widths: Sequence[int], outputs: int, gain: float) -> Tensor:
    """The weights of a network at first; `gain` is that of its last layer."""
    shapes = list(itertools.pairwise([*widths, outputs]))
    gains = [math.sqrt(2)] * (len(shapes) - 1) + [gain]
    matrices = [
        nn.init.orthogonal_(torch.empty(count, inputs), one).T
        for (inputs, count), one in zip(shapes, gains, strict=True)
    ]
    return torch.cat([t.flatten() for m in matrices for t in (m, torch.zeros(m.shape[1]))])

"""Algorithms by name: which advantage, which loss, which clip and which divisor each one is.

A name stands for what its paper says; every part can be chosen by itself as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from rlinf.workers.algorithms.advantages import grpo, leave_one_out
from rlinf.workers.algorithms.losses import (
    Clip,
    Normalisation,
    PolicyLoss,
    cispo,
    gspo,
    ppo_clip,
)
from rlinf.workers.algorithms.shaping import DynamicSampling, Overlong

__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "GROUP_ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageKind",
    "Algorithm",
    "LossKind",
]

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gae"]
ADVANTAGES: tuple[AdvantageKind, ...] = get_args(AdvantageKind)

GROUP_ADVANTAGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": partial(grpo, scale=False),
    "rloo": leave_one_out,
}
"""Those that one group decides: (rewards, scored) -> advantages. The others need the whole batch:
`reinforce++` its tokens' mean and deviation, `gae` a critic and the same."""

LossKind = Literal["ppo", "gspo", "cispo"]
POLICY_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip | None], PolicyLoss]] = {
    "ppo": lambda new, old, advantages, _, clip: ppo_clip(new, old, advantages, clip),
    "gspo": gspo,
    "cispo": lambda new, old, advantages, _, clip: cispo(new, old, advantages, clip),
}
"""(log-probs, old log-probs, advantages, mask, clip) -> the loss of each token."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The parts of one algorithm, under the names that a trainer's configuration has for them.

    Attributes:
        advantage: How rewards become advantages. `gae` needs a critic.
        loss: Which policy loss.
        clip: Its bounds; None: those of its paper.
        normalisation: What the summed loss is divided by.
        overlong: Penalty of long responses, or None.
        dynamic: Whether and how long to sample on for informative groups, or None.
        frozen_steps: Steps in which only the critic learns.
    """

    advantage: AdvantageKind
    loss: LossKind = "ppo"
    clip: Clip | None = None
    normalisation: Normalisation = field(default_factory=Normalisation)
    overlong: Overlong | None = None
    dynamic: DynamicSampling | None = None
    frozen_steps: int = 0

    def settings(self) -> dict[str, Any]:
        """The parts as plain nested mappings, as a configuration file would have them."""
        return asdict(self)


ALGORITHMS: Mapping[str, Algorithm] = {
    "ppo": Algorithm("gae", clip=Clip(0.2, 0.2), frozen_steps=5),
    "grpo": Algorithm("grpo", clip=Clip(0.2, 0.2), normalisation=Normalisation("sequence")),
    "dr_grpo": Algorithm("dr_grpo", clip=Clip(0.2, 0.2), normalisation=Normalisation("constant")),
    "dapo": Algorithm("grpo", clip=Clip(0.2, 0.28), dynamic=DynamicSampling()),
    "rloo": Algorithm("rloo", normalisation=Normalisation("sequence")),
    "reinforce++": Algorithm("reinforce++", clip=Clip(0.2, 0.2)),
    "gspo": Algorithm("grpo", "gspo", Clip(3e-4, 4e-4), Normalisation("sequence")),
    "cispo": Algorithm("grpo", "cispo", Clip(1.0, 0.28)),
}
"""Sources: ppo arXiv:1707.06347, grpo arXiv:2402.03300, dr_grpo arXiv:2503.20783, dapo
arXiv:2503.14476, rloo arXiv:2402.14740, reinforce++ arXiv:2501.03262, gspo arXiv:2507.18071, cispo
arXiv:2506.13585. RLOO's paper takes the sum over a response as its one action; with `sequence` its
length does not weigh. The overlong penalty of DAPO needs a length that only the user knows."""

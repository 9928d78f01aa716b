"""Algorithms by name: which advantage, which loss, which clip and which divisor each one is.

A name stands for what its paper says; every part can be chosen by itself as well. Plain data: what
the parts do is in `functions.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlinf.workers.algorithms.parts import (
    AdvantageKind,
    Clip,
    DynamicSampling,
    LossKind,
    Normalisation,
    Overlong,
)

__all__ = ["ALGORITHMS", "Algorithm"]


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

"""What the names of advantages and losses stand for."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from rlinf.workers.algorithms.advantages import grpo, leave_one_out
from rlinf.workers.algorithms.losses import Clip, PolicyLoss, cispo, gspo, ppo_clip

__all__ = ["GROUP_ADVANTAGES", "POLICY_LOSSES"]

GROUP_ADVANTAGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": partial(grpo, scale=False),
    "rloo": leave_one_out,
}
"""Those that one group decides: (rewards, scored) -> advantages. The others need the whole batch:
`reinforce++` its tokens' mean and deviation, `gae` a critic and the same."""

POLICY_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip | None], PolicyLoss]] = {
    "ppo": lambda new, old, advantages, _, clip: ppo_clip(new, old, advantages, clip),
    "gspo": gspo,
    "cispo": lambda new, old, advantages, _, clip: cispo(new, old, advantages, clip),
}
"""(log-probs, old log-probs, advantages, mask, clip) -> the loss of each token."""

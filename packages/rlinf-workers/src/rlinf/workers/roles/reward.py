"""Reward: judges the responses of a group. Not judged at all is something else than judged bad."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from rlinf.workers.roles.rollout import Group, IntArray

__all__ = ["STATUSES", "RewardEngine", "RewardModel", "Score", "ScoredGroup", "Status"]

Status = Literal["scored", "unscored", "format_error"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""What the numbers in `ScoredGroup.status` mean.

`scored`: the reward says how good the response is. `unscored`: it could not be judged (a deadline,
a dead judge); such a sample is left out of means and advantages. `format_error`: no answer could be
read from the response; its reward counts like any other and is usually 0.
"""


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one response. `value` is always a float."""

    value: float
    status: Status = "scored"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A group with its rewards: what a trainer learns from.

    Attributes:
        group: The responses.
        rewards: float32 [n]; 0 where unscored.
        status: uint8 [n], indexes into `STATUSES`.
        advantages: float32 [n], or [n, T] a token, or None: the trainer computes them.
        reference_logprobs: float32 [n, T] of a reference policy for a KL penalty, or None.
        old_logprobs: float32 [n, T] of the trainer's policy before the step, or None.
    """

    group: Group
    rewards: npt.NDArray[np.float32]
    status: npt.NDArray[np.uint8]
    advantages: npt.NDArray[np.float32] | None = None
    reference_logprobs: npt.NDArray[np.float32] | None = None
    old_logprobs: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, group: Group, scores: Sequence[Score]) -> "ScoredGroup":
        """`group` with one score a sample. Raises `ValueError` when the counts differ."""
        if len(scores) != group.n:
            raise ValueError(f"group {group.uid} has {group.n} samples but {len(scores)} scores")
        known = [0.0 if score.status == "unscored" else score.value for score in scores]
        status = [STATUSES.index(score.status) for score in scores]
        return cls(group, np.array(known, np.float32), np.array(status, np.uint8))

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """Which samples have a reward, bool [n]."""
        return np.asarray(self.status != STATUSES.index("unscored"))

    @property
    def informative(self) -> bool:
        """Whether two scored samples have different rewards."""
        known = self.rewards[self.scored]
        return bool(len(known) and known.max() > known.min())

    @property
    def learnable(self) -> npt.NDArray[np.bool_]:
        """Tokens that the model wrote in scored samples, bool [n, T]."""
        return np.asarray(self.group.trainable & self.scored[:, None])

    @property
    def token_rewards(self) -> npt.NDArray[np.float32]:
        """Each sample's reward at the last token the model wrote, float32 [n, T]; else 0."""
        placed = np.zeros(self.group.tokens.shape, np.float32)
        learnable = self.learnable
        ended = np.flatnonzero(learnable.any(1))
        last = learnable.shape[1] - 1 - learnable[ended, ::-1].argmax(1)
        placed[ended, last] = self.rewards[ended]
        return placed

    @property
    def token_count(self) -> int:
        """Tokens that the model wrote, of all responses together."""
        return self.group.token_count


@runtime_checkable
class RewardEngine(Protocol):
    """Scores groups. The verdict depends on the response alone, not on the thread or the time."""

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Score each group, in order; a response that cannot be judged is `unscored`."""


@runtime_checkable
class RewardModel(Protocol):
    """A model that judges, as token ids of the policy's own tokenizer."""

    def score(self, rows: Sequence[tuple[IntArray, IntArray]]) -> Sequence[float]:
        """One value for each (prompt, response), in order; NaN where it has none.

        A row's value must not depend on the rows around it, except for rounding.
        """

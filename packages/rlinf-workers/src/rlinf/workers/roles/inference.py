"""Inference: log-probs of responses under a policy that does not learn from them.

The reference policy is one, and so is the trainer's own of before the step.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from rlinf.workers.roles.residency import Residency
from rlinf.workers.roles.reward import ScoredGroup

__all__ = ["Compared", "InferenceEngine"]

Compared = Literal["reference_logprobs", "old_logprobs"]
"""Which field of a `ScoredGroup` an inference engine fills."""


@runtime_checkable
class InferenceEngine(Residency, Protocol):
    """Reads what others wrote. The result does not depend on how groups were cut into calls."""

    def compare(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups, in order, with the engine's log-probs [n, T]; 0 behind a response's end."""

"""Inference: log-probs of responses under a policy that does not learn, such as the reference."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rlinf.workers.roles.residency import Residency
from rlinf.workers.roles.reward import ScoredGroup

__all__ = ["InferenceEngine"]


@runtime_checkable
class InferenceEngine(Residency, Protocol):
    """Reads what others wrote. The result does not depend on how groups were cut into calls."""

    def compare(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups, in order, with `reference_logprobs` [n, T]; 0 behind each response's end."""

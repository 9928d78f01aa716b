"""The judge of the benchmark `rlhf`. In a file of its own: its process needs no torch."""

from collections.abc import Sequence

from rlinf.workers.roles import Group, Score, ScoredGroup

__all__ = ["Even"]


class Even:
    """A `RewardEngine`: 1 where the sum of the response's tokens is even."""

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """See `RewardEngine`."""
        return [
            ScoredGroup.of(
                group, [Score(float(group.own(i).sum() % 2 == 0)) for i in range(group.n)]
            )
            for group in groups
        ]

"""Episode: what is known of several turns beside their tokens."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

__all__ = ["OUTCOMES", "EpisodeStats", "Episodes", "Outcome"]

Outcome = Literal["answered", "budget", "truncated", "format_error", "tool_failure"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""What the numbers in `Episodes.outcome` mean.

`answered`: a well-formed answer. `budget`: it wanted another call, or more context, than it may
have. `truncated`: cut off in the middle of a turn. `format_error`: it ended without an answer, or
with one that cannot be read. `tool_failure`: a tool failed and no answer came after it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Facts about the n samples of a group.

    Attributes:
        outcome: uint8 [n], indexes into `OUTCOMES`.
        calls: int32 [n], tools called.
        failed: int32 [n], of these, those without an answer.
        invalid: int32 [n], actions that made no sense, and were not carried out.
        tool_s: float32 [n], seconds from calls to their answers.
    """

    outcome: npt.NDArray[np.uint8]
    calls: npt.NDArray[np.int32]
    failed: npt.NDArray[np.int32]
    invalid: npt.NDArray[np.int32]
    tool_s: npt.NDArray[np.float32]

    def ended(self, outcome: Outcome) -> npt.NDArray[np.bool_]:
        """Which samples ended so, bool [n]."""
        return np.asarray(self.outcome == OUTCOMES.index(outcome))


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """Sums over episodes; add them to get those of all. 0 for samples that are no episodes.

    Attributes:
        episodes: How many.
        answered: With each outcome, as all up to `tool_failure`.
        budget: See `OUTCOMES`.
        truncated: See `OUTCOMES`.
        format_error: See `OUTCOMES`.
        tool_failure: See `OUTCOMES`.
        calls: Tools called.
        failed: Calls without an answer.
        invalid: Actions that were not carried out.
        tool_s: Seconds from calls to their answers.
    """

    episodes: int = 0
    answered: int = 0
    budget: int = 0
    truncated: int = 0
    format_error: int = 0
    tool_failure: int = 0
    calls: int = 0
    failed: int = 0
    invalid: int = 0
    tool_s: float = 0.0

    @classmethod
    def of(cls, facts: Episodes | None) -> "EpisodeStats":
        """What there is to count in a group."""
        if facts is None:
            return cls()
        ends = np.bincount(facts.outcome, minlength=len(OUTCOMES)).tolist()
        sums = [facts.calls.sum(), facts.failed.sum(), facts.invalid.sum()]
        values: list[Any] = [len(facts.outcome), *ends, *map(int, sums), float(facts.tool_s.sum())]
        return cls(*values)

    def __add__(self, other: "EpisodeStats") -> "EpisodeStats":
        return EpisodeStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        """Shares and means of an episode, the mean latency of a call; empty without episodes."""
        if not self.episodes:
            return {}
        shares = {name: getattr(self, name) / self.episodes for name in OUTCOMES}
        return shares | {
            "calls": self.calls / self.episodes,
            "invalid_calls": self.invalid / self.episodes,
            "failed_calls": float(self.failed),
            "tool_latency_s": self.tool_s / max(self.calls, 1),
        }

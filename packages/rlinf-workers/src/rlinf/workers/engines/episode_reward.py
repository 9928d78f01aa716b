"""The reward of an episode: what its last turn answers, compared with what is right.

Only what the model wrote in that turn is read; an answer in a document that was retrieved, in a
thought or in an earlier turn is none.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rlinf.workers.engines.rule_reward import exact_match
from rlinf.workers.episodes.episode import Language
from rlinf.workers.episodes.turn_format import Answer
from rlinf.workers.roles.episode import OUTCOMES, Episodes
from rlinf.workers.roles.reward import Score, ScoredGroup
from rlinf.workers.roles.rollout import Group

__all__ = ["EpisodeReward", "final_answer"]

UNSCORED = Score(0.0, "unscored")


def final_answer(group: Group, sample: int, language: Language) -> str | None:
    """What a sample answered in its last turn; None where it answered nothing."""
    row = group.trainable[sample, : group.lengths[sample]]
    ours = np.flatnonzero(~row)
    start = int(ours[-1]) + 1 if len(ours) else 0
    text = language.codec.decode(group.response(sample)[start:].tolist())
    action = language.turns.read(text)
    return action.text if isinstance(action, Answer) else None


class EpisodeReward:
    """A `RewardEngine` for episodes: 1.0 for a right answer, else 0.0 or `format_reward`.

    An episode in which a tool failed is unscored: it says nothing about the model.

    Args:
        language: How turns are read.
        answers: The right answers to each item; any of them will do.
        format_reward: For a well-formed answer that is wrong.
    """

    def __init__(
        self,
        language: Language,
        answers: Mapping[int, Sequence[str]],
        format_reward: float = 0.0,
    ) -> None:
        self._language, self._answers = language, answers
        self._format_reward = format_reward

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One verdict a sample. See `RewardEngine`. Raises `ValueError` for what is no episode."""
        return [ScoredGroup.of(group, self._scores(group)) for group in groups]

    def _scores(self, group: Group) -> list[Score]:
        if group.episodes is None:
            raise ValueError(f"group {group.uid} has no episodes")
        return [self._score(group, group.episodes, i) for i in range(group.n)]

    def _score(self, group: Group, facts: Episodes, sample: int) -> Score:
        outcome = OUTCOMES[facts.outcome[sample]]
        if facts.failed[sample]:
            return UNSCORED
        if outcome == "format_error":
            return Score(0.0, "format_error")
        answer = final_answer(group, sample, self._language) if outcome == "answered" else None
        if answer is None:
            return Score(0.0)
        right = exact_match(answer, self._answers[group.item])
        return Score(1.0 if right else self._format_reward)

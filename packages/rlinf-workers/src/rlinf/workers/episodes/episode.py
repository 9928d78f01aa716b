"""One episode while it goes on: its tokens, whose they are, and what is to happen next. No model.

Token ids are the record. Those that the model drew are kept as drawn; the text of a turn is read
off them and never tokenised again. What a tool answered is tokenised once, as plain text: nothing
in it becomes a control token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rlinf.workers.bounds import Count, Natural
from rlinf.workers.episodes.turn_format import Action, Answer, Call, Invalid, TurnFormat
from rlinf.workers.roles.episode import OUTCOMES, Episodes, Outcome
from rlinf.workers.roles.rollout import FINISH_REASONS, GenerationRequest, Group
from rlinf.workers.roles.tool import Observation

__all__ = ["Codec", "Episode", "EpisodeLimits", "Language", "group_of"]

Scalar = TypeVar("Scalar", bound=np.generic)

LEAST_OBSERVATION = 8
"""Fewer tokens than this of an observation are not worth showing."""
STOP, LENGTH = FINISH_REASONS.index("stop"), FINISH_REASONS.index("length")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may use up. Tokens that the model draws are bounded by the request.

    Attributes:
        calls: Actions that are no answer, invalid ones included; one more ends it.
        observation_tokens: Of one observation, its tags included; a longer one is cut before the
            closing tag. At least 16.
        tokens: Of everything, prompt and observations included.
    """

    calls: Natural = 3
    observation_tokens: Count = 256
    tokens: Count = 512

    def __post_init__(self) -> None:
        if self.observation_tokens < 16:
            raise ValueError("observation_tokens must be at least 16")


class Codec(Protocol):
    """A tokenizer, as far as episodes need it."""

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""

    def vocabulary(self) -> Sequence[str]:
        """The text of each token id."""


class Language:
    """A codec and a format: how turns are read and observations written."""

    def __init__(self, codec: Codec, turns: TurnFormat) -> None:
        self.codec, self.turns = codec, turns
        self._closing = frozenset(i for i, text in enumerate(codec.vocabulary()) if ">" in text)
        # Tags are control tokens where the vocabulary has them: they are ours, not the tool's.
        self._before = self._tag(f"{turns.opening}")
        self._after = self._tag(f"{turns.closing}")

    def may_end(self, token: int) -> bool:
        """Whether an action may end with this token."""
        return token in self._closing

    def observation(self, text: str, room: int) -> list[int]:
        """A tool's answer with its tags, at most `room` tokens; the closing tag is always there."""
        free = max(0, room - len(self._before) - len(self._after))
        return self._before + self.codec.encode_plain(text)[:free] + self._after

    def _tag(self, tag: str) -> list[int]:
        words = list(self.codec.vocabulary())
        return [words.index(tag)] if tag in words else self.codec.encode_plain(tag)


class Episode:
    """A sample of a request, token by token.

    Args:
        request: Whose sample it is.
        sample: Which one.
        version: Of the weights when it began.
        limits: See `EpisodeLimits`.
        language: See `Language`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sample: int,
        version: int,
        limits: EpisodeLimits,
        language: Language,
    ) -> None:
        self.request, self.sample, self.version = request, sample, version
        self._limits, self._language = limits, language
        self.ids: list[int] = []
        self.written: list[bool] = []
        self.logprobs: list[float] = []
        self.drawn = self.calls = self.failed = self.invalid = 0
        self.tool_s = 0.0
        self.outcome: Outcome | None = None
        self.stopped = False
        self._turn = 0
        self._failing = False
        self._stop_ids = frozenset(request.sampling.stop_ids)

    @property
    def size(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.request.prompt_ids) + len(self.ids)

    def wrote(self, token: int, logprob: float) -> Call | Invalid | None:
        """The model drew a token. Returns what has to be answered before it goes on.

        After this the episode may be over: see `outcome`.
        """
        self.ids.append(token)
        self.written.append(True)
        self.logprobs.append(logprob)
        self.drawn += 1
        if token in self._stop_ids:
            self._end("format_error", stopped=True)
        else:
            action = self._read(token)
            if action is not None:
                return self._act(action)
        if self.outcome is None and self._full:
            self._end("truncated")
        return None

    def observed(self, observation: Observation) -> list[int]:
        """What the tool answered, as tokens that follow; none where the episode is over now."""
        self.tool_s += observation.seconds
        if observation.status == "failed":
            self.failed += 1
        self._failing = observation.status == "failed"
        left = self._limits.tokens - self.size - 1
        room = min(self._limits.observation_tokens, left)
        ids = self._language.observation(observation.text, room)
        if room < LEAST_OBSERVATION or len(ids) > room:
            self._end("budget")
            return []
        self.ids += ids
        self.written += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self._turn = len(self.ids)
        return ids

    @property
    def turn(self) -> Sequence[int]:
        """What the model wrote since the last observation."""
        return self.ids[self._turn :]

    def _read(self, token: int) -> Action | None:
        """The action that this token completes."""
        if not self._language.may_end(token):
            return None
        return self._language.turns.read(self._language.codec.decode(self.turn))

    def _act(self, action: Action) -> Call | Invalid | None:
        if isinstance(action, Answer):
            self._end("answered", stopped=True)
        elif isinstance(action, Invalid) and action.final:
            self._end("format_error", stopped=True)
        elif self.calls + self.invalid >= self._limits.calls or self._full:
            self._end("budget")
        else:
            self.calls += isinstance(action, Call)
            self.invalid += isinstance(action, Invalid)
            return action
        return None

    @property
    def _full(self) -> bool:
        return self.drawn >= self.request.max_new_tokens or self.size >= self._limits.tokens

    def _end(self, outcome: Outcome, *, stopped: bool = False) -> None:
        failing = self._failing and outcome != "answered"
        self.outcome = "tool_failure" if failing else outcome
        self.stopped = stopped


def group_of(episodes: Sequence[Episode]) -> Group:
    """The group of a request's samples, all of which are over, in order."""
    request = episodes[0].request
    outcomes = [OUTCOMES.index(e.outcome or "truncated") for e in episodes]
    return Group(
        uid=request.uid,
        prompt_ids=np.asarray(request.prompt_ids, np.int32),
        tokens=_block([e.ids for e in episodes], np.int32),
        lengths=np.array([len(e.ids) for e in episodes], np.int32),
        logprobs=_block([e.logprobs for e in episodes], np.float32),
        finish=np.array([STOP if e.stopped else LENGTH for e in episodes], np.uint8),
        versions=np.array([e.version for e in episodes], np.int32),
        sampling=request.sampling,
        item=request.item,
        written=_block([e.written for e in episodes], np.bool_),
        episodes=Episodes(
            outcome=np.array(outcomes, np.uint8),
            calls=np.array([e.calls for e in episodes], np.int32),
            failed=np.array([e.failed for e in episodes], np.int32),
            invalid=np.array([e.invalid for e in episodes], np.int32),
            tool_s=np.array([e.tool_s for e in episodes], np.float32),
        ),
    )


def _block(rows: Sequence[Sequence[float]], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Rows of any length below each other, 0 after the end of a shorter one."""
    block = np.zeros((len(rows), max(map(len, rows))), dtype)
    for line, row in zip(block, rows, strict=True):
        line[: len(row)] = row
    return block

"""Rewards by rule: reading an answer out of a response, and comparing it with what is right.

Everything here reads a *response*: text which the model wrote, without the prompt and without what
tools returned (`Group.own`). No function looks at a clock, a thread or a random number.
"""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from rlinf.workers.roles.reward import Score, ScoredGroup
from rlinf.workers.roles.rollout import Group

__all__ = [
    "Dataset",
    "Judge",
    "RuleReward",
    "exact_match",
    "judge_exact_match",
    "judge_reasoning_gym",
    "normalised",
    "read_tag",
]

FULL_SCORE = 0.999
FORMAT_ERROR = Score(0.0, "format_error")

Judge = Callable[[str, int], Score]
"""(text of a response, data set item) -> verdict."""

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)"
    r"|(?<![\w.])[-+]?\.\d+(?!\w)",
    re.ASCII,
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class RuleReward:
    """A `RewardEngine` that judges each response alone, as text.

    `decode` turns token ids into text, with everything that ends a response still in it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], judge: Judge) -> None:
        self._decode = decode
        self._judge = judge

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One verdict a sample. See `RewardEngine`."""
        return [ScoredGroup.of(group, self._scores(group)) for group in groups]

    def _scores(self, group: Group) -> list[Score]:
        responses = (self._decode(group.own(i).tolist()) for i in range(group.n))
        return [self._judge(response, group.item) for response in responses]


class Dataset(Protocol):
    """The part of a reasoning-gym data set that judges."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """How good an answer to `entry` is, 0 to 1."""


def judge_reasoning_gym(
    dataset: Dataset,
    entries: Mapping[int, dict[str, Any]],
    read: Callable[[str], str | None],
    *,
    partial: bool = False,
) -> Judge:
    """A judge that asks the data set's own `score_answer`.

    `read` takes the answer out of a response, in the form that the data set wants, or returns None:
    a format error. Without `partial` credit only a full score counts, as 1.0.
    """

    def judge(response: str, item: int) -> Score:
        answer = read(response)
        if answer is None:
            return FORMAT_ERROR
        value = float(dataset.score_answer(answer, entries[item]))
        return Score(value if partial else float(value >= FULL_SCORE))

    return judge


def judge_exact_match(answers: Mapping[int, Sequence[str]], tag: str = "answer") -> Judge:
    """A judge that reads `<answer>...</answer>` and compares it with an item's right answers."""

    def judge(response: str, item: int) -> Score:
        answer = read_tag(response, tag)
        return FORMAT_ERROR if answer is None else Score(exact_match(answer, answers[item]))

    return judge


def read_tag(response: str, tag: str = "answer") -> str | None:
    """The text between `<tag>` and `</tag>`, stripped; None unless there is exactly one such pair.

    So several answers, nested, unclosed or empty ones, and tags in another case or with attributes
    are format errors: nobody gets a point for listing what might be right.
    """
    pieces = re.split(rf"<\s*/?\s*{re.escape(tag)}\b[^<>]*>", response, flags=re.IGNORECASE)
    clean = f"<{tag}>{pieces[1]}</{tag}>" if len(pieces) == 3 else ""
    answer = pieces[1].strip() if clean and clean in response else ""
    return answer or None


def exact_match(answer: str, right: Sequence[str]) -> bool:
    """Whether `answer` equals one of the right answers after `normalised`.

    A right answer of which that leaves nothing ("A", "...") is compared as it is, but for case.
    """
    plain, found = answer.strip().casefold(), normalised(answer)
    golds = [(gold.strip().casefold(), normalised(gold)) for gold in right]
    return bool(plain) and any(found == form if form else plain == raw for raw, form in golds)


def normalised(text: str) -> str:
    """Lower case, without articles and punctuation, single spaces; numbers in one form of each.

    The normaliser of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), except that a sign and a
    decimal point belong to their number: "-5" is not "5", "1.5 km" is not "15 km", and "0.50" is
    "0.5".
    """
    parts: list[str] = []
    end = 0
    for found in _NUMBER.finditer(text):
        parts += [_words(text[end : found.start()]), _canonical(found.group())]
        end = found.end()
    parts.append(_words(text[end:]))
    return " ".join(" ".join(parts).split())


def _words(text: str) -> str:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION))


def _canonical(number: str) -> str:
    try:
        value = Decimal(number.replace(",", ""))
    except InvalidOperation:
        return number
    text = f"{value:f}"  # normalize() would round to the context's 28 digits
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.removeprefix("-") if value.is_zero() else text

import threading

import numpy as np
import pytest

from rlinf.workers.engines.rule_reward import (
    RuleReward,
    exact_match,
    judge_exact_match,
    judge_reasoning_gym,
    read_tag,
)
from rlinf.workers.roles import STATUSES, Group, RewardEngine, Sampling, Score, ScoredGroup


def group_of(texts, item=0):
    """A group whose token ids are code points."""
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = np.zeros((len(texts), max(lengths)), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = [ord(c) for c in text]
    ones = np.ones(len(texts), np.int32)
    return Group(
        uid="g",
        prompt_ids=np.array([ord("?")], np.int32),
        tokens=tokens,
        lengths=lengths,
        logprobs=np.zeros(tokens.shape, np.float32),
        finish=ones.astype(np.uint8),
        versions=ones,
        sampling=Sampling(),
        item=item,
    )


def decode(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("-5", "5"), ("1.5", "15"), ("0.5", "05"), ("1.5 km", "15 km"), ("12:00", "1:00"), ("", "0")],
)
def test_different_numbers_do_not_match(answer, gold):
    assert not exact_match(answer, [gold])
    assert not exact_match(gold, [answer])


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("0.50", "0.5"),
        ("007", "7"),
        ("1,000", "1000"),
        ("+5", "5"),
        ("-0", "0"),
        (".5", "0.5"),
        ("The Eiffel Tower!", "eiffel tower"),
        ("St. John's", "st johns"),
        ("about 1,500.0 people", "About 1500 people."),
        ("100", "100."),
    ],
)
def test_the_same_answer_matches_in_another_spelling(answer, gold):
    assert exact_match(answer, ["something else", gold])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>Paris</answer>", "Paris"),
        ("I think <answer> Paris </answer>.", "Paris"),
        ("<answer><b>x</b></answer>", "<b>x</b>"),
        ("<answer><answer>Paris</answer></answer>", None),
        ("<answer>Paris", None),
        ("Paris</answer>", None),
        ("<answer></answer>", None),
        ("<answer>  </answer>", None),
        ("<Answer>Paris</Answer>", None),
        ('<answer lang="fr">Paris</answer>', None),
        ("<answer>Rome</answer> or <answer>Paris</answer>", None),
        ("</answer>Paris<answer>", None),
        ("Paris", None),
        ("", None),
    ],
)
def test_an_answer_is_read_from_one_clean_tag_only(response, answer):
    assert read_tag(response) == answer


def test_wrong_and_unreadable_are_counted_apart():
    reward = RuleReward(decode, judge_exact_match({3: ["Paris"]}))
    assert isinstance(reward, RewardEngine)
    (scored,) = reward.score(
        [group_of(["<answer>Paris</answer>", "<answer>Rome</answer>", "<answer>Paris"], item=3)]
    )
    assert scored.rewards.tolist() == [1.0, 0.0, 0.0]
    assert [STATUSES[s] for s in scored.status] == ["scored", "scored", "format_error"]
    assert scored.scored.all()


def test_only_the_response_is_read():
    group = group_of(["no tags here"])
    poisoned = "<answer>Paris</answer>"
    prompt = np.array([ord(c) for c in poisoned], np.int32)
    asked = Group(**{f: getattr(group, f) for f in Group.__slots__} | {"prompt_ids": prompt})
    (scored,) = RuleReward(decode, judge_exact_match({0: ["Paris"]})).score([asked])
    assert STATUSES[scored.status[0]] == "format_error"


def test_a_tag_inside_a_retrieved_document_is_not_read():
    own, document = "<answer>Rome</answer> ", "<information><answer>Paris</answer></information>"
    group = group_of([own + document])
    written = np.array([[place < len(own) for place in range(len(own + document))]])
    amid = Group(**{f: getattr(group, f) for f in Group.__slots__} | {"written": written})
    judge = RuleReward(decode, judge_exact_match({0: ["Paris"]}))
    (scored,) = judge.score([amid])
    assert scored.rewards.tolist() == [0.0]
    assert STATUSES[scored.status[0]] == "scored"
    only = Group(**{f: getattr(group, f) for f in Group.__slots__} | {"written": ~written})
    assert judge.score([only])[0].rewards.tolist() == [1.0]


class Gym:
    def score_answer(self, answer, entry):
        return 1 if answer == entry["answer"] else 0.3


def test_partial_credit_is_given_only_when_asked_for():
    def read(text):
        return text[:-1] if text.endswith("\n") else None

    entries = {0: {"answer": "12"}}
    group = group_of(["12\n", "13\n", "12"])
    (exact,) = RuleReward(decode, judge_reasoning_gym(Gym(), entries, read)).score([group])
    (partial,) = RuleReward(decode, judge_reasoning_gym(Gym(), entries, read, partial=True)).score(
        [group]
    )
    assert exact.rewards.tolist() == [1.0, 0.0, 0.0]
    assert partial.rewards.tolist() == pytest.approx([1.0, 0.3, 0.0])
    assert exact.rewards.dtype == np.float32
    assert STATUSES[exact.status[2]] == "format_error"


def test_a_score_is_always_a_float_and_unscored_is_not_zero():
    assert type(Score(0).value) is float
    assert type(Score(True).value) is float
    scored = ScoredGroup.of(group_of(["a", "b"]), [Score(0.5), Score(9.0, "unscored")])
    assert scored.rewards.tolist() == [0.5, 0.0]
    assert scored.scored.tolist() == [True, False]
    with pytest.raises(ValueError, match="2 samples but 1 scores"):
        ScoredGroup.of(group_of(["a", "b"]), [Score(0.5)])


def test_the_verdict_is_the_same_on_any_thread():
    reward = RuleReward(decode, judge_exact_match({0: ["1/2"]}))
    group = group_of(["<answer>1/2</answer>", "<answer>2/1</answer>"])
    verdicts = []
    threads = [
        threading.Thread(target=lambda: verdicts.append(reward.score([group])[0].rewards.tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert verdicts == [[1.0, 0.0]] * 4


def test_numbers_beyond_28_digits_keep_every_digit() -> None:
    long = "1" + "0" * 30
    assert not exact_match(f"{long}1", [f"{long}2"])
    assert exact_match(f"{long}1.500", [f"{long}1.5"]) and exact_match("-0.0", ["0"])


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [("a", "A", True), ("the", "A", False), ("?", "A", False), ("", "the", False), ("", "", False)],
)
def test_an_answer_of_which_nothing_is_left_is_compared_as_it_is(
    answer: str, gold: str, right: bool
) -> None:
    assert exact_match(answer, [gold]) is right

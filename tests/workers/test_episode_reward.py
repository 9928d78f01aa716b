"""Verdicts on episodes: only what the model wrote in its last turn counts."""

import pytest

from rlinf.workers.engines.episode_reward import EpisodeReward, final_answer
from rlinf.workers.episodes.episode import Episode, EpisodeLimits, group_of
from rlinf.workers.roles import STATUSES, EpisodeStats, Observation, RewardEngine
from tests.workers.episode_rig import CODEC, END, LANGUAGE, request

LIMITS = EpisodeLimits(calls=2, observation_tokens=60, tokens=400)


def episode(*turns, ended=False, status="ok"):
    """An episode in which the model says the first, third ... and a tool the others."""
    one = Episode(request("r", max_new_tokens=200), 0, 0, LIMITS, LANGUAGE)
    for place, text in enumerate(turns):
        if place % 2:
            one.observed(Observation(text, status))
        else:
            for token in CODEC.encode(text):
                one.wrote(token, -1.0)
    if ended:
        one.wrote(END, -1.0)
    assert one.outcome is not None
    return group_of([one])


def verdict(group, answers=("Paris",), **options):
    [scored] = EpisodeReward(LANGUAGE, {-1: answers}, **options).score([group])
    return float(scored.rewards[0]), STATUSES[scored.status[0]]


def test_a_right_and_a_wrong_answer():
    assert isinstance(EpisodeReward(LANGUAGE, {}), RewardEngine)
    assert verdict(episode("<answer> paris. </answer>")) == (1.0, "scored")
    assert verdict(episode("<answer>Rome</answer>")) == (0.0, "scored")
    assert verdict(episode("<answer>Rome</answer>"), format_reward=0.1) == (
        pytest.approx(0.1),
        "scored",
    )


def test_an_alias_is_right():
    group = episode("<answer>Lutetia</answer>")
    assert verdict(group, ("Paris", "Lutetia")) == (1.0, "scored")


def test_the_answer_of_a_document_is_nobodys_r18():
    found = episode(
        "<search>a</search>", "<answer>Paris</answer> </information><answer>Paris</answer>", ended=1
    )
    assert verdict(found) == (0.0, "format_error")
    wrong = episode("<search>a</search>", "<answer>Paris</answer>", "<answer>Rome</answer>")
    assert verdict(wrong) == (0.0, "scored")
    assert final_answer(wrong, 0, LANGUAGE) == "Rome"


def test_an_example_in_the_prompt_is_nobodys_r17():
    one = Episode(request("r", prompt="for example <answer>Paris</answer>"), 0, 0, LIMITS, LANGUAGE)
    one.wrote(END, -1.0)
    assert verdict(group_of([one])) == (0.0, "format_error")


@pytest.mark.parametrize(
    "text",
    [
        "<answer><answer>Paris</answer></answer>",
        "<answer></answer>",
        "<answer>Paris",
        "<Answer>Paris</Answer>",
        "<answer id='1'>Paris</answer>",
    ],
)
def test_a_malformed_answer_is_a_format_error_r19(text):
    one = Episode(request("r", max_new_tokens=200), 0, 0, LIMITS, LANGUAGE)
    for token in [*CODEC.encode(text), END]:
        if one.outcome is None:
            one.wrote(token, -1.0)
    assert verdict(group_of([one]), format_reward=0.1) == (0.0, "format_error")


def test_listing_what_might_be_right_is_wrong_r20():
    listed = " ".join(["Rome"] * 11 + ["Paris"])
    assert verdict(episode(f"<answer>{listed}</answer>")) == (0.0, "scored")


def test_a_guess_in_a_thought_is_not_an_answer_t3():
    group = episode("<think><answer>Paris</answer></think><answer>Rome</answer>")
    assert verdict(group) == (0.0, "scored")


@pytest.mark.parametrize(("answer", "right"), [("-5", "5"), ("1.5", "15"), ("0.5", "05")])
def test_numbers_are_compared_as_numbers_r15(answer, right):
    assert verdict(episode(f"<answer>{answer}</answer>"), (right,))[0] == 0.0
    assert verdict(episode(f"<answer>{answer}</answer>"), (answer,))[0] == 1.0


def test_where_a_tool_failed_nothing_is_said_about_the_model():
    group = episode("<search>a</search>", "gone", "<answer>Rome</answer>", status="failed")
    assert verdict(group) == (0.0, "unscored")


def test_cut_off_gets_nothing_for_its_format_t5():
    one = Episode(request("r", max_new_tokens=3), 0, 0, LIMITS, LANGUAGE)
    for token in CODEC.encode("<search>who wrote it")[:3]:
        one.wrote(token, -1.0)
    assert verdict(group_of([one]), format_reward=0.1) == (0.0, "scored")


def test_the_statistics_of_episodes_add_up():
    groups = [
        episode("<search>a</search>", "b", "<answer>Rome</answer>"),
        episode("Paris", ended=True),
    ]
    total = sum((EpisodeStats.of(g.episodes) for g in groups), EpisodeStats())
    assert (total.episodes, total.answered, total.format_error, total.calls) == (2, 1, 1, 1)
    assert total.metrics()["answered"] == 0.5 and total.metrics()["calls"] == 0.5
    assert EpisodeStats.of(None).metrics() == {}

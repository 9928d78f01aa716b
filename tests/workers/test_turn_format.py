"""What a model wants, read off a turn. t1, r19 ...: known bugs of others."""

import pytest

from rlinf.workers.episodes.turn_format import Answer, Call, Invalid, TurnFormat

FORMAT = TurnFormat(["search", "python"])


def read(turn):
    return FORMAT.read(turn)


def test_a_call_and_an_answer():
    assert read("<think>hm</think> so <search> who wrote it </search>") == Call(
        "search", "who wrote it"
    )
    assert read("<python>print(1)</python>") == Call("python", "print(1)")
    assert read("I know: <answer>Paris</answer>") == Answer("Paris")


@pytest.mark.parametrize("turn", ["", "text", "<search>who wro", "<answer>Par", "<think>a</think>"])
def test_what_is_not_complete_is_no_action(turn):
    assert read(turn) is None


def test_nested_tags_are_invalid_t1():
    found = read("<search><search>q</search></search>")
    assert isinstance(found, Invalid) and not found.final
    found = read("<search>q <answer>Paris</answer></search>")
    assert isinstance(found, Invalid) and not found.final


def test_tags_in_thoughts_do_not_count_t3():
    assert read("<think>I could <search>q</search> it</think><answer>Paris</answer>") == Answer(
        "Paris"
    )
    assert read("<think>or <answer>x</answer>") is None, "the thought goes on"
    assert read("<think>a<think>b</think><search>q</search>") == Call("search", "q")


def test_an_empty_call_is_invalid_t6():
    found = read("<search> </search>")
    assert isinstance(found, Invalid) and not found.final


def test_the_first_of_two_calls_counts_t7():
    assert read("<search>a</search><search>b</search>") == Call("search", "a")


def test_a_block_of_information_that_the_model_wrote_is_text_t9():
    assert read("<information>Paris</information>") is None
    assert read("<information>x</information><search>q</search>") == Call("search", "q")


@pytest.mark.parametrize(
    "turn", ["<answer><answer>Paris</answer></answer>", "<answer></answer>", "<answer> \n</answer>"]
)
def test_a_malformed_answer_is_final_r19(turn):
    found = read(turn)
    assert isinstance(found, Invalid) and found.final


@pytest.mark.parametrize(
    "turn",
    [
        "<Answer>Paris</Answer>",
        '<answer lang="en">Paris</answer>',
        "< answer>Paris</ answer>",
        "</answer>",
        "<answer>Paris",
    ],
)
def test_what_only_looks_like_an_answer_is_text_r19(turn):
    assert read(turn) is None


def test_tags_must_be_different_words():
    with pytest.raises(ValueError):
        TurnFormat(["answer"])
    with pytest.raises(ValueError):
        TurnFormat(["se arch"])
    assert FORMAT.tags[:4] == ("<think>", "</think>", "<search>", "</search>")

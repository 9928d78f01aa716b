"""The verdict traps of math verifiers, judged as in a run: in a process with a deadline."""

import threading

import pytest

from rlinf.workers.engines.judge_pool import JudgePool, PoolConfig
from rlinf.workers.engines.math_judge import make_math_judge, read_boxed

GOLDS = {}
QUESTIONS = []


def asked(gold, answer):
    """An item with this right answer, and the response that boxes `answer`."""
    item = GOLDS.setdefault(gold, len(GOLDS))
    QUESTIONS.append((f"so it is \\boxed{{{answer}}}.", item))
    return len(QUESTIONS) - 1


DIFFERENT = [
    ("1/2004!", "1/2006!"),
    ("1/2^99", "1/2^98"),
    ("10^{-20}", "2\\cdot 10^{-20}"),
    ("x/2^99", "x/2^98"),
    ("\\{2^{-99}, 1\\}", "\\{2^{-98}, 1\\}"),
    ("0", "1/2004!"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("±2021", "2021"),
    ("12:00", "1:00"),
    ("n=2,3,4", "n=1,2,3"),
    ("(0,1)", "(0,1.5)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("\\infty", "-\\infty"),
    ("50", "50%"),
    ("1/3", "0.33"),
    ("123456789", "123456788"),
    ("2", "the answer is 2, or maybe 3"),
]
SAME = [
    ("4", "004"),
    ("73", "**73**"),
    ("13", "\\text{13}"),
    ("1000", "1{,}000"),
    ("1000", "1,000"),
    ("5", "x=5"),
    ("3", "3 cm"),
    ("90", "90°"),
    ("90", "90^\\circ"),
    ("{1,2}", "{2,1}"),
    ("0.5", "50%"),
    ("\\frac{1}{2}", "0.5"),
    ("1/3", "0.333333"),
    ("x^2-1", "(x-1)(x+1)"),
    ("2x-y+3=0", "4x-2y+6=0"),
    ("\\frac{3}{4}", "\\frac{6}{8}"),
]
PLACES = {pair: asked(*pair) for pair in (*DIFFERENT, *SAME)}


@pytest.fixture(scope="module")
def pool():
    with JudgePool(make_math_judge({i: gold for gold, i in GOLDS.items()})) as made:
        yield made


@pytest.fixture(scope="module")
def scores(pool):
    return pool.judge(QUESTIONS)


@pytest.mark.parametrize("pair", DIFFERENT, ids=str)
def test_different_answers_are_not_equal(scores, pair):
    assert scores[PLACES[pair]].value == 0
    assert scores[PLACES[pair]].status in ("scored", "format_error")


@pytest.mark.parametrize("pair", SAME, ids=str)
def test_equal_answers_are_equal_in_another_spelling(scores, pair):
    assert (scores[PLACES[pair]].value, scores[PLACES[pair]].status) == (1.0, "scored")


def test_a_response_without_an_answer_is_a_format_error(pool):
    item = GOLDS["0"]
    empty = ["\\boxed{}", "\\boxed{0", "0", "", "\\boxed{no idea at all &&}"]
    assert [s.status for s in pool.judge([(text, item) for text in empty])] == [
        "format_error"
    ] * len(empty)


def test_the_last_box_counts():
    assert read_boxed("\\boxed{3} no, \\boxed{\\frac{1}{2}} is right") == "\\frac{1}{2}"
    assert read_boxed("\\boxed{a{b}c}") == "a{b}c"
    assert read_boxed("\\boxed{3} and \\boxed{4") is None


HOSTILE = (
    "+".join(["9^{9^{9^{9}}}"] * 10),
    "(" * 10_000 + "1" + ")" * 10_000,
    "x^{y^{z}} " * 10_000,
)


def test_degenerate_answers_are_given_up_and_the_next_ones_are_judged():
    answers = [(f"\\boxed{{{text}}}", 0) for hostile in HOSTILE for text in (hostile, "2")]
    with JudgePool(make_math_judge({0: "2"}), PoolConfig(deadline_s=1.0)) as quick:
        scores = quick.judge(answers)
        counts = quick.statistics()
    assert [score.value for score in scores] == [0.0, 1.0] * len(HOSTILE)
    assert {score.status for score in scores[::2]} <= {"unscored", "format_error"}
    assert counts.late + counts.died >= 1
    assert all(type(score.value) is float for score in scores)


def test_the_verdict_is_the_same_off_the_main_thread(pool, scores):
    found = []
    thread = threading.Thread(target=lambda: found.extend(pool.judge(QUESTIONS[:4])))
    thread.start()
    thread.join(timeout=60)
    assert found == scores[:4]


def test_an_unreadable_right_answer_is_not_the_response_s_fault():
    with JudgePool(make_math_judge({0: "&&"})) as broken:
        assert broken.judge([("\\boxed{2}", 0)])[0].status == "unscored"

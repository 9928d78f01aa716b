import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlinf.workers.engines.judge_pool import JudgeFailed, JudgePool, PoolConfig, PooledReward
from rlinf.workers.roles import STATUSES, Group, RewardEngine, Sampling

sys.path.insert(0, str(Path(__file__).parent))
import judges

QUICK = PoolConfig(deadline_s=0.3)


@pytest.fixture(scope="module")
def pool():
    with JudgePool(judges.make_obedient, QUICK) as made:
        yield made


def test_verdicts_come_in_order(pool):
    scores = pool.judge([("score 0.5", 0), ("item", 7), ("no such thing", 0), ("print", 0)])
    assert [score.value for score in scores] == [0.5, 7.0, 0.0, 0.25]
    assert [score.status for score in scores] == ["scored", "scored", "format_error", "scored"]
    assert all(type(score.value) is float for score in scores)
    assert pool.judge([]) == []


@pytest.mark.parametrize("hostile", ["spin", "regex", "sleep", "stop"])
def test_a_verdict_that_takes_too_long_is_unscored(pool, hostile):
    before = pool.statistics()
    scores = pool.judge([("score 1", 0), (hostile, 0), ("score 1", 0)])
    assert [score.status for score in scores] == ["scored", "unscored", "scored"]
    after = pool.statistics()
    assert (after.late - before.late, after.died - before.died) == (1, 0)


@pytest.mark.parametrize(
    "hostile", ["exit", "signal", "memory", "crash", "raise", "mute", "chatter"]
)
def test_a_judge_that_dies_is_replaced(pool, hostile):
    before = pool.statistics()
    scores = pool.judge([(hostile, 0), ("score 1", 0)])
    assert [score.status for score in scores] == ["unscored", "scored"]
    assert pool.statistics().died == before.died + 1


def test_a_long_answer_does_not_block(pool):
    text = "score 1" + " " * (1 << 20)
    assert [score.value for score in pool.judge([(text, 0), (text, 0)])] == [1.0, 1.0]
    scores = pool.judge([("stop", 0), (text, 0)])
    assert [score.status for score in scores] == ["unscored", "scored"]


def test_a_judge_killed_between_two_calls_is_replaced(pool):
    assert pool.judge([("score 1", 0)])[0].value == 1
    for child in judges_of_this_process():
        child.kill()
        child.wait()
    before = pool.statistics()
    assert pool.judge([("score 1", 0)])[0].value == 1
    assert pool.statistics().died == before.died


def judges_of_this_process():
    return [
        child
        for child in psutil.Process().children()
        if "rlinf.workers.engines.judge_process" in child.cmdline()
    ]


def test_the_verdict_is_the_same_on_any_thread(pool):
    found = []

    def ask(item):
        found.append((item, pool.judge([("item", item)])[0].value))

    threads = [threading.Thread(target=ask, args=(item,)) for item in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == [(i, float(i)) for i in range(4)]


def test_several_judges_work_side_by_side_and_leave_nothing():
    before = len(judges_of_this_process())
    with JudgePool(judges.make_obedient, PoolConfig(processes=2, deadline_s=0.3)) as pair:
        answers = [("item", i) if i % 3 else ("spin", i) for i in range(9)]
        scores = pair.judge(answers)
        assert [s.status == "unscored" for s in scores] == [i % 3 == 0 for i in range(9)]
        assert [s.value for s in scores if s.status == "scored"] == [1, 2, 4, 5, 7, 8]
        assert (pair.statistics().judged, pair.statistics().late) == (6, 3)
    assert len(judges_of_this_process()) == before


def test_a_judge_that_cannot_be_made_is_an_error_with_its_reason():
    with (
        JudgePool(judges.make_nothing, QUICK) as broken,
        pytest.raises(JudgeFailed, match="there is no judge here"),
    ):
        broken.judge([("score 1", 0)])


def test_a_judge_ends_with_its_parent():
    """Its input ends; it needs no signal."""
    with JudgePool(judges.make_obedient, QUICK) as own:
        own.judge([("score 1", 0)])
        member = own._members[0]
        process = member._process
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_groups_are_judged_by_what_the_model_wrote():
    text = "score 1##item"
    tokens = np.array([[ord(c) for c in text]], np.int32)
    written = np.array([[c not in "#" and i < 8 for i, c in enumerate(text)]])
    n, width = tokens.shape
    group = Group(
        uid="0",
        prompt_ids=tokens[0],
        tokens=tokens,
        lengths=np.array([width], np.int32),
        logprobs=np.zeros((n, width), np.float32),
        finish=np.ones(n, np.uint8),
        versions=np.zeros(n, np.int32),
        sampling=Sampling(),
        item=5,
        written=written,
    )
    with JudgePool(judges.make_obedient, QUICK) as own:
        reward = PooledReward(lambda ids: "".join(map(chr, ids)), own)
        assert isinstance(reward, RewardEngine)
        (scored,) = reward.score([group])
    assert scored.rewards.tolist() == [1.0]
    assert STATUSES[scored.status[0]] == "scored"


def test_settings_that_make_no_sense_are_refused():
    for make in (partial(PoolConfig, processes=0), partial(PoolConfig, deadline_s=0)):
        with pytest.raises(ValueError, match="at least one process"):
            make()

import pytest
import torch

from rlinf.workers.algorithms.shaping import (
    DynamicSampling,
    Overlong,
    informative,
    overlong_penalty,
)


def test_the_penalty_grows_over_the_buffer_and_stays_there():
    lengths = torch.tensor([1, 80, 85, 100, 120])
    found = overlong_penalty(lengths, 100, Overlong(buffer=20, penalty=2.0))
    assert found.tolist() == pytest.approx([0, 0, -0.5, -2.0, -2.0])
    with pytest.raises(ValueError, match="buffer of 20 tokens in a limit of 10"):
        overlong_penalty(lengths, 10, Overlong(buffer=20))


def test_a_group_is_informative_where_its_scored_rewards_differ():
    rewards = torch.tensor([[1.0, 0.0], [1.1, 1.1], [1.0, 0.0], [torch.nan, 1.0]])
    scored = torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]])
    assert informative(rewards, scored).tolist() == [True, False, False, False]
    assert informative(rewards[:2]).tolist() == [True, False]


def test_sampling_on_has_a_bound():
    dynamic = DynamicSampling(groups=4, rounds=3)
    assert dynamic.lacking(found=3, rounds=1) == 1, "a rejected group is replaced by one (S14)"
    assert dynamic.lacking(found=0, rounds=2) == 4
    assert dynamic.lacking(found=0, rounds=3) == 0
    assert dynamic.lacking(found=4, rounds=1) == dynamic.lacking(found=5, rounds=1) == 0


@pytest.mark.parametrize(
    "make",
    [lambda: Overlong(0), lambda: Overlong(8, -1.0), lambda: DynamicSampling(rounds=0)],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="at least"):
        make()

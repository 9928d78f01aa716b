import logging

import pytest
import torch

from rlinf.workers.algorithms.advantages import (
    gae,
    gae_stream,
    grpo,
    leave_one_out,
    reinforce_plus_plus,
    returns,
    settle_rewards,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reward", [1.1, 0.1, -0.3, 1e6, 1e-7])
@pytest.mark.parametrize("n", [2, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(reward, n, dtype):
    rewards = torch.full((n,), reward, dtype=dtype)
    for advantages in (grpo(rewards), grpo(rewards, scale=False), leave_one_out(rewards)):
        assert torch.equal(advantages, torch.zeros(n, dtype=dtype))
        assert advantages.dtype == dtype


def test_a_group_of_one_is_zero_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert torch.equal(grpo(torch.tensor([[0.7]])), torch.zeros(1, 1))
        assert torch.equal(leave_one_out(torch.tensor([0.7])), torch.zeros(1))
    assert "fewer than two" in caplog.text


def test_grpo_divides_by_the_unbiased_deviation():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.2, 0.4, 0.9, 0.1]], dtype=torch.float64)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert torch.allclose(grpo(rewards), expected, atol=1e-12)
    assert torch.allclose(grpo(rewards, scale=False), rewards - rewards.mean(1, keepdim=True))


def test_unscored_samples_neither_count_nor_get_an_advantage():
    rewards = torch.tensor([1.0, 0.0, torch.nan, 0.5])
    scored = torch.tensor([1, 1, 0, 1])
    kept = grpo(rewards[[0, 1, 3]])
    advantages = grpo(rewards, scored)
    assert torch.equal(advantages[[0, 1, 3]], kept)
    assert advantages[2] == 0


def test_leave_one_out_stays_at_the_scale_of_the_rewards():
    rewards = torch.tensor([0.35] * 7 + [0.0], dtype=torch.float64)
    advantages = leave_one_out(rewards)
    assert advantages[7] == pytest.approx(-0.35)
    others = torch.stack([torch.cat([rewards[:i], rewards[i + 1 :]]).mean() for i in range(8)])
    assert torch.allclose(advantages, rewards - others)


def test_masked_tokens_are_no_steps_for_gae():
    advantages, targets = gae(
        torch.tensor([[0.0, 1.0, 0.0]]),
        torch.tensor([[0.0, 0.0, 100.0]]),
        torch.tensor([[1, 1, 0]]),
        gamma=1.0,
        lam=0.95,
    )
    assert torch.allclose(advantages, torch.tensor([[0.95, 1.0, 0.0]]))
    assert torch.allclose(targets, torch.tensor([[0.95, 1.0, 0.0]]))


def test_a_terminal_reward_on_a_masked_token_is_not_lost():
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 1, 0]])
    assert torch.equal(settle_rewards(rewards, mask), torch.tensor([[0.0, 1.0, 0.0]]))
    advantages, _ = gae(rewards, torch.zeros(1, 3), mask, lam=1.0)
    assert torch.equal(advantages, torch.tensor([[1.0, 1.0, 0.0]]))
    assert torch.equal(returns(rewards, mask), torch.tensor([[1.0, 1.0, 0.0]]))


def test_rewards_settle_on_the_nearest_trainable_token_before_them():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 2.0, 4.0, 8.0, 16.0]])
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    assert torch.equal(
        settle_rewards(rewards, mask), torch.tensor([[0.0, 7.0, 0, 24, 0], [0.0, 0, 0, 0, 0]])
    )


def test_returns_pass_over_masked_gaps():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 1]])
    assert torch.equal(returns(rewards, mask, 1.0), torch.tensor([[1.0, 1, 0, 0, 1, 1]]))


def test_masked_gaps_do_not_discount():
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]])
    assert torch.equal(returns(rewards, mask, 0.5), torch.tensor([[0.5, 0.0, 1.0]]))


def test_reinforce_plus_plus_whitens_over_the_batch():
    rewards = torch.zeros(3, 4)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 2.0])
    advantages = reinforce_plus_plus(rewards, torch.ones(3, 4))
    assert advantages.mean().abs() < 1e-6
    assert torch.allclose(advantages.std(), torch.tensor(1.0))


def naive_gae(rewards, values, bootstrap, gamma, lam):
    """The definition: a sum over all later steps."""
    after = [*values[1:], bootstrap]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def test_gae_equals_its_definition_and_ignores_inserted_tokens():
    generator = torch.manual_seed(1)
    rewards, values = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(5, generator=generator, dtype=torch.float64)
    advantages, targets = gae(
        rewards, values, torch.ones(5, 6), gamma=0.9, lam=0.8, bootstrap=bootstrap
    )
    for row in range(5):
        expected = naive_gae(rewards[row].tolist(), values[row].tolist(), bootstrap[row], 0.9, 0.8)
        assert torch.allclose(advantages[row], torch.tensor(expected, dtype=torch.float64))
    assert torch.allclose(targets, advantages + values)

    place = torch.tensor([1, 2, 4, 7, 8, 9])
    mask = torch.zeros(5, 11, dtype=torch.int64)
    mask[:, place] = 1
    wide = [torch.zeros(5, 11, dtype=torch.float64), torch.full((5, 11), torch.nan).double()]
    wide[0][:, place], wide[1][:, place] = rewards, values
    inserted, _ = gae(*wide, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    assert torch.equal(inserted[:, place], advantages)
    assert inserted.isfinite().all()


def test_truncation_bootstraps_and_termination_does_not():
    one = torch.ones(1, 1)
    values, following, no, yes = one * 2, one * 10, torch.zeros(1, 1), one
    terminated, _ = gae_stream(one, values, following, (yes, no), gamma=0.5)
    truncated, _ = gae_stream(one, values, following, (no, yes), gamma=0.5)
    assert terminated.item() == 1 - 2
    assert truncated.item() == 1 + 0.5 * 10 - 2


def test_nothing_flows_back_over_a_reset():
    generator = torch.manual_seed(2)
    rewards, values, following = torch.randn(3, 7, 1, generator=generator, dtype=torch.float64)
    following[[0, 1, 3, 4, 5]] = values[[1, 2, 4, 5, 6]]
    terminated = torch.zeros(7, 1)
    truncated = torch.zeros(7, 1)
    terminated[2] = truncated[6] = 1
    advantages, targets = gae_stream(
        rewards, values, following, (terminated, truncated), gamma=0.9, lam=0.8
    )
    flat = [x[:, 0].tolist() for x in (rewards, values, following)]
    first = naive_gae(flat[0][:3], flat[1][:3], 0.0, 0.9, 0.8)
    second = naive_gae(flat[0][3:], flat[1][3:], flat[2][6], 0.9, 0.8)
    assert torch.allclose(advantages[:, 0], torch.tensor(first + second, dtype=torch.float64))
    assert torch.allclose(targets, advantages + values)

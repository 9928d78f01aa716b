"""What is written out by hand against autograd, in float64."""

import math

import pytest
import torch

from rlinf.workers.algorithms.losses import Clip, ppo_clip, value_loss
from rlinf.workers.engines.mlp_actor import MlpSizes
from rlinf.workers.engines.mlp_policy import MlpPolicy, MlpStart
from rlinf.workers.engines.policy_learning import PolicyTrainerConfig
from rlinf.workers.engines.policy_slopes import slopes
from rlinf.workers.engines.trajectory_batch import Flat
from rlinf.workers.roles.policy import Evaluation

ROWS = 37
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def recorded(policy: MlpPolicy, states: torch.Tensor, choices: torch.Tensor) -> Evaluation:
    """The same policy as plain operations, which autograd records."""
    sizes, rest = policy.sizes, policy.weights

    def taken(*shape: int) -> torch.Tensor:
        nonlocal rest
        part, rest = rest[: math.prod(shape)], rest[math.prod(shape) :]
        return part.view(shape)

    def network(outputs: int, x: torch.Tensor) -> torch.Tensor:
        for width in sizes.hidden:
            x = torch.tanh(x @ taken(x.shape[1], width) + taken(width))
        return x @ taken(x.shape[1], outputs) + taken(outputs)

    answer = network(sizes.outputs, states)
    if sizes.bins:
        drawn = torch.distributions.Categorical(logits=answer.view(len(states), -1, sizes.bins))
    else:
        drawn = torch.distributions.Normal(answer, taken(len(sizes.low)).exp())
    values = network(1, states)[:, 0]
    assert not len(rest)
    return Evaluation(drawn.log_prob(choices).sum(1), drawn.entropy().sum(1), values)


@pytest.mark.parametrize("bins", [0, 5])
@pytest.mark.parametrize("hidden", [(16,), (8, 12), (4, 4, 4)])
@pytest.mark.parametrize("learnt", ["all", "logprobs"])
def test_a_small_policy_has_the_gradient_that_autograd_finds(bins, hidden, learnt) -> None:
    sizes = MlpSizes(3, (-1.0, 0.0), (1.0, 2.0), hidden, bins)
    policy = MlpPolicy(sizes, MlpStart(seed=1, std=0.7)).double()
    with torch.no_grad():
        policy.weights += 0.1 * normal(len(policy.weights))
    states, choices = normal(ROWS, 3), normal(ROWS, 2, seed=1)
    choices = (choices.abs() * 2).long().clamp(max=4) if bins else choices
    given = [normal(ROWS, seed=seed) for seed in (2, 3, 4)]
    by = (given[0], None, None) if learnt == "logprobs" else tuple(given)
    expected = recorded(policy, states, choices)
    expected.backward(*by)
    gradient = policy.weights.grad.clone()
    found = policy.evaluate({"state": states}, choices)
    for name in ("logprobs", "entropy", "values"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **CLOSE)
    torch.testing.assert_close(policy.values({"state": states}), found.values, **CLOSE)
    found.backward(*by)
    torch.testing.assert_close(policy.weights.grad, 2 * gradient, **CLOSE)
    policy.weights.grad = None
    policy.evaluate({"state": states}, choices).backward(*by)
    torch.testing.assert_close(policy.weights.grad, gradient, **CLOSE)


@pytest.mark.parametrize("clip", [Clip(), Clip(0.1, 0.3, dual=1.5)])
@pytest.mark.parametrize("value_clip", [None, 0.2])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_the_slopes_of_the_losses_are_those_that_autograd_finds(
    clip, value_clip, entropy, advantage
) -> None:
    config = PolicyTrainerConfig(
        clip=clip, value_clip=value_clip, entropy_coefficient=entropy, advantage=advantage
    )
    leaves = [normal(ROWS, seed=seed).requires_grad_() for seed in (5, 6, 7)]
    old, advantages, targets, before = (normal(ROWS, seed=seed) for seed in (8, 9, 10, 11))
    old[:4] += torch.tensor([30.0, 30, -30, -30], dtype=torch.float64)
    advantages[:4] = torch.tensor([1.0, -1, 1, -1])
    found, count = Evaluation(*leaves), 2 * ROWS
    policy = ppo_clip(found.logprobs, old, advantages, clip).loss.sum() / count
    loss, values = policy - entropy * found.entropy.sum() / count, policy.new_zeros(())
    if advantage == "gae":
        values = value_loss(found.values, before, targets, value_clip).sum() / count
        loss = loss + 2 * config.value_coefficient * values
    expected = torch.autograd.grad(loss, leaves, materialize_grads=True)
    part = Flat({}, torch.zeros(ROWS), old, advantages, targets, before)
    told = slopes(found, part, advantages, count, config)
    for slope, correct in zip(told.answers, expected, strict=True):
        slope = torch.zeros(ROWS, dtype=torch.float64) if slope is None else slope
        torch.testing.assert_close(
            slope, correct, rtol=1e-9, atol=1e-8
        )  # the ratio is e^-20 at least
    sums = torch.stack([policy, values, found.entropy.sum() / count]).detach()
    torch.testing.assert_close(told.sums, sums, **CLOSE)


def test_slopes_become_gradients_of_whatever_the_answers_came_from() -> None:
    weights = normal(3).requires_grad_()
    found = Evaluation(weights * 2, weights * 3, weights * 5)
    ones = torch.ones(3, dtype=torch.float64)
    found.backward(ones, None, ones)
    assert weights.grad.tolist() == [7, 7, 7]

import pytest
import torch

from rlinf.workers.algorithms.losses import (
    Clip,
    Normalisation,
    cispo,
    gspo,
    importance_weights,
    ppo_clip,
    reduce,
    value_loss,
)

NORMALISATIONS = [
    Normalisation("token"),
    Normalisation("sequence"),
    Normalisation("constant", constant=16),
]


def test_clip_cuts_in_the_direction_of_the_advantage_only():
    old = torch.zeros(1, 4)
    logprobs = torch.tensor([[1.0, -1.0, 1.0, -1.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    result = ppo_clip(logprobs, old, advantages, Clip(0.2, 0.28))
    result.loss.sum().backward()
    ratio = logprobs.detach().exp()
    expected = torch.tensor([[-1.28, -ratio[0, 1], ratio[0, 2], 0.8]])
    assert torch.allclose(result.loss, expected)
    assert torch.equal(result.clipped, torch.tensor([[True, False, False, True]]))
    assert torch.allclose(logprobs.grad, torch.tensor([[0.0, -ratio[0, 1], ratio[0, 2], 0.0]]))


def test_on_policy_the_gradient_is_that_of_reinforce():
    logprobs = torch.randn(3, 5, generator=torch.manual_seed(0)).requires_grad_()
    advantages = torch.tensor([[1.0], [-2.0], [0.5]])
    for loss in (ppo_clip, cispo):
        logprobs.grad = None
        loss(logprobs, logprobs.detach(), advantages).loss.sum().backward()
        assert torch.allclose(logprobs.grad, -advantages.expand(3, 5))


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    logprobs = torch.tensor([[3.0, 3.0]], requires_grad=True)
    result = ppo_clip(
        logprobs, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), Clip(0.2, 0.2, dual=3.0)
    )
    result.loss.sum().backward()
    assert torch.allclose(result.loss, torch.tensor([[3.0, -1.2]]))
    assert torch.equal(logprobs.grad, torch.zeros(1, 2))


@pytest.mark.parametrize("distance", [90.0, -90.0, 1e30])
def test_a_huge_log_ratio_has_no_nan_gradient(distance):
    for advantage in (1.0, -1.0):
        logprobs = torch.tensor([[distance]], requires_grad=True)
        ppo_clip(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]])).loss.sum().backward()
        assert logprobs.grad.isfinite().all()


def test_gspo_uses_the_ratio_of_the_whole_response():
    old = torch.zeros(2, 3, dtype=torch.float64)
    logprobs = torch.tensor(
        [[1e-4, 3e-4, 9.0], [0.1, 0.1, 0.1]], dtype=torch.float64, requires_grad=True
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    result = gspo(logprobs, old, torch.ones(2, 1, dtype=torch.float64), mask)
    total, rows = reduce(result.loss, mask, Normalisation("sequence"))
    (total / rows).backward()
    sequence = torch.tensor(2e-4, dtype=torch.float64).exp()
    assert torch.allclose(result.ratio[0, :2], sequence)
    assert torch.allclose(logprobs.grad[0], -sequence / 2 / 2 * torch.tensor([1.0, 1, 0]).double())
    assert torch.equal(logprobs.grad[1], torch.zeros(3, dtype=torch.float64))
    assert result.clipped[1].all()


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logprobs = torch.tensor([[2.0]], requires_grad=True)
    result = cispo(logprobs, torch.zeros(1, 1), torch.ones(1, 1), Clip(1.0, 0.28))
    result.loss.sum().backward()
    assert result.clipped.all()
    assert torch.allclose(logprobs.grad, torch.tensor([[-1.28]]))


def test_importance_weights_are_truncated_and_detached():
    trainer = torch.tensor([0.0, 5.0, -1.0], requires_grad=True)
    weights = importance_weights(trainer, torch.zeros(3), cap=2.0)
    assert torch.allclose(weights, torch.tensor([1.0, 2.0, torch.tensor(-1.0).exp()]))
    assert not weights.requires_grad


def test_a_mean_of_means_is_not_the_mean():
    parts = [torch.full((1, 2), 10.0), torch.full((1, 8), 1.0)]
    sums = [reduce(part, torch.ones_like(part), Normalisation("token")) for part in parts]
    assert sum(s for s, _ in sums) / sum(w for _, w in sums) == pytest.approx(2.8)


def test_the_constant_divisor_does_not_depend_on_the_padding():
    loss = torch.ones(2, 3)
    wide = torch.cat([loss, torch.full((2, 5), 7.0)], 1)
    mask = torch.cat([torch.ones(2, 3), torch.zeros(2, 5)], 1)
    norm = Normalisation("constant", constant=10)
    assert reduce(loss, torch.ones(2, 3), norm) == reduce(wide, mask, norm)
    total, rows = reduce(loss, torch.ones(2, 3), norm)
    assert total / rows == pytest.approx(0.3)


def test_a_row_that_is_masked_throughout_is_no_row():
    loss = torch.tensor([[1.0, 1.0], [torch.nan, 5.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    total, rows = reduce(loss, mask, Normalisation("sequence"))
    assert (total.item(), rows.item()) == (1.0, 1.0)
    total, tokens = reduce(loss, mask, Normalisation("token"))
    assert (total.item(), tokens.item()) == (2.0, 2.0)


@pytest.mark.parametrize("normalisation", NORMALISATIONS, ids=lambda n: n.kind)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(normalisation, parts):
    generator = torch.manual_seed(3)
    weight = torch.randn(6, generator=generator, dtype=torch.float64)
    inputs = torch.randn(8, 5, 6, generator=generator, dtype=torch.float64)
    old = -torch.rand(8, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([5, 1, 3, 2, 0, 4, 5, 1])
    mask = torch.arange(5) < lengths[:, None]

    def gradient(chunks):
        leaf = weight.clone().requires_grad_()
        weights = torch.zeros((), dtype=torch.float64)
        for rows in chunks:
            loss = ppo_clip(inputs[rows] @ leaf, old[rows], advantages[rows]).loss
            total, part = reduce(loss, mask[rows], normalisation)
            total.backward()
            weights += part
        return leaf.grad / weights

    whole = gradient([torch.arange(8)])
    assert torch.allclose(gradient(torch.arange(8).chunk(parts)), whole, rtol=1e-12, atol=1e-15)


def test_value_loss_takes_the_worse_of_clipped_and_free():
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    loss = value_loss(values, torch.zeros(2), torch.tensor([2.0, 2.0]), clip=0.5)
    loss.sum().backward()
    assert torch.allclose(loss, torch.tensor([0.5 * 1.5**2, 0.5 * 2.0**2]))
    assert torch.equal(values.grad, torch.tensor([0.0, -2.0]))
    free = value_loss(values.detach(), torch.zeros(2), torch.tensor([2.0, 2.0]))
    assert torch.allclose(free, torch.tensor([0.5, 2.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clip(low=-0.1),
        lambda: Clip(dual=1.0),
        lambda: Normalisation("constant", constant=0.0),
        lambda: Normalisation("token", constant=4),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"must|belongs"):
        make()

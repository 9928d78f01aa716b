import pytest
import torch

from rlinf.workers.algorithms.kl import LIMIT, clamped, kl


def expected_gradient(kind):
    """The exact gradient of KL(policy || reference), and E over the policy of the estimate's."""
    policy = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64, requires_grad=True)
    mine, theirs = policy.log_softmax(-1), other.log_softmax(-1)
    weights = mine.exp().detach()
    (sampled,) = torch.autograd.grad((weights * kl(mine, theirs, kind)).sum(), policy)
    mine = policy.log_softmax(-1)
    (forward,) = torch.autograd.grad((mine.exp() * (mine - theirs.detach())).sum(), policy)
    mine = policy.log_softmax(-1)
    reverse_value = (theirs.detach().exp() * (theirs.detach() - mine)).sum()
    (reverse,) = torch.autograd.grad(reverse_value, policy)
    return sampled, forward, reverse


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_the_gradient_of_k2_is_that_of_kl(kind):
    sampled, forward, _ = expected_gradient(kind)
    assert torch.allclose(sampled, forward, atol=1e-12)


def test_the_gradient_of_k1_is_zero_and_of_k3_that_of_the_other_kl():
    sampled, forward, _ = expected_gradient("k1")
    assert torch.allclose(sampled, torch.zeros(3, dtype=torch.float64), atol=1e-12)
    sampled, forward, reverse = expected_gradient("k3")
    assert torch.allclose(sampled, reverse, atol=1e-6)
    assert not torch.allclose(sampled, forward, atol=1e-2)


def test_k1_and_k3_are_unbiased():
    mine = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64).log_softmax(-1)
    theirs = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)
    exact = (mine.exp() * (mine - theirs)).sum()
    for kind in ("k1", "k3", "k1+", "k3+"):
        assert torch.allclose((mine.exp() * kl(mine, theirs, kind)).sum(), exact, atol=1e-7), kind


@pytest.mark.parametrize("distance", [6.0, 29.0, 500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_far_token_is_pulled_back_with_a_bounded_gradient(distance, dtype):
    logprobs = torch.tensor([-distance], dtype=dtype, requires_grad=True)
    reference = torch.zeros(1, dtype=dtype)
    value = kl(logprobs, reference, "k3")
    value.sum().backward()
    assert value.isfinite().all()
    assert value.dtype == torch.float32
    assert -torch.tensor(LIMIT).exp() <= logprobs.grad.item() < -100
    assert clamped(logprobs, reference).all()


def test_k3_is_never_negative_and_continuous_at_its_seams():
    distance = torch.cat([torch.logspace(-12, 2, 20_000), -torch.logspace(-12, 2, 20_000)])
    assert (kl(-distance, torch.zeros_like(distance), "k3") >= 0).all()
    for seam in (1e-2, -1e-2, LIMIT):
        around = torch.tensor([seam * (1 - 1e-8), seam * (1 + 1e-8)], dtype=torch.float64)
        low, high = kl(-around, torch.zeros_like(around), "k3")
        assert abs(high - low) < 1e-6 * abs(high)


def test_log_probs_of_minus_infinity_under_the_mask_stay_local():
    logprobs = torch.tensor([-1.0, -1e30], requires_grad=True)
    value = kl(logprobs, torch.tensor([-1.5, 0.0]), "k3")
    value[0].backward()
    assert logprobs.grad.isfinite().all()


def test_half_precision_is_computed_in_float32():
    logprobs, reference = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0078125]).bfloat16()
    assert kl(logprobs, reference, "k2").item() == pytest.approx(0.5 * 0.0078125**2)

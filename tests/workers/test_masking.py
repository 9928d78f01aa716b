import pytest
import torch

from rlinf.workers.algorithms.masking import masked_mean, masked_sum, masked_whiten, row_means

DTYPES = (torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_of_the_mask_does_not_matter(dtype):
    values, mask = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1, 1, 0]).to(dtype)
    assert masked_sum(values, mask) == 3.0
    assert masked_mean(values, mask) == 1.5
    assert torch.equal(
        masked_whiten(values, mask), masked_whiten(values, torch.tensor([True, True, False]))
    )


def test_what_lies_under_the_mask_does_not_matter():
    mask = torch.tensor([[1, 0], [1, 0]])
    values = torch.tensor([[1.0, torch.nan], [3.0, torch.inf]], requires_grad=True)
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean == 2.0
    assert torch.equal(values.grad, torch.tensor([[0.5, 0.0], [0.5, 0.0]]))
    whitened = masked_whiten(values.detach(), mask)
    assert whitened.isfinite().all()
    assert torch.equal(whitened[:, 1], torch.zeros(2))


def test_an_empty_mask_gives_zero_and_no_nan():
    values, mask = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    assert masked_mean(values, mask) == 0.0
    assert torch.equal(masked_mean(values, mask, 1), torch.zeros(1))
    assert torch.equal(masked_whiten(values, mask), torch.zeros(1, 2))
    assert torch.equal(masked_whiten(torch.zeros(0, 2), torch.zeros(0, 2)), torch.zeros(0, 2))


def test_rows_that_are_masked_throughout_are_dropped_and_counted():
    values = torch.tensor([[1.0, 1.0], [7.0, 9.0], [1.0, 3.0]])
    means, dropped = row_means(values, torch.tensor([[1, 0], [0, 0], [1, 1]]))
    assert torch.equal(means, torch.tensor([1.0, 2.0]))
    assert dropped == 1


def test_one_valid_entry_whitens_to_zero():
    values, mask = torch.tensor([3.0, 8.0, 9.0]), torch.tensor([1, 0, 0])
    assert torch.equal(masked_whiten(values, mask), torch.zeros(3))
    assert torch.equal(masked_whiten(values, mask, shift_mean=False), torch.tensor([3.0, 0, 0]))


def test_equal_entries_whiten_to_zero_though_their_mean_is_rounded():
    assert torch.equal(masked_whiten(torch.full((10,), 1.1), torch.ones(10)), torch.zeros(10))


def test_whitening_gives_mean_zero_and_unbiased_variance_one():
    values = torch.randn(64, generator=torch.manual_seed(0), dtype=torch.float64) * 3 + 5
    mask = torch.arange(64) % 3 > 0
    whitened = masked_whiten(values, mask)[mask]
    assert whitened.mean().abs() < 1e-12
    assert (whitened.std() - 1).abs() < 1e-6
    kept = masked_whiten(values, mask, shift_mean=False)[mask]
    assert torch.allclose(kept.mean(), values[mask].mean())


def test_inserting_masked_tokens_changes_nothing():
    values, mask = torch.tensor([1.0, 4.0, 6.0]), torch.tensor([1, 1, 1])
    longer, gaps = torch.tensor([1.0, 99.0, 4.0, -99.0, 6.0]), torch.tensor([1, 0, 1, 0, 1])
    assert torch.allclose(masked_whiten(values, mask), masked_whiten(longer, gaps)[gaps.bool()])

"""Masked reductions that do not care what lies under the mask, nor of which dtype the mask is.

A masked position never takes part: not its value (it may be NaN), not in a count or a gradient.
"""

import torch
from torch import Tensor

__all__ = ["as_mask", "at_least_float32", "masked_mean", "masked_sum", "masked_whiten", "row_means"]


def as_mask(mask: Tensor) -> Tensor:
    """`mask` as bool: non-zero means that the position counts."""
    return mask if mask.dtype == torch.bool else mask != 0


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or as they are where they are float64 already."""
    return values if values.dtype == torch.float64 else values.float()


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is set; 0 where nothing is. Gradients stay inside the mask."""
    kept = torch.where(as_mask(mask), values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is set; 0 where nothing is set.

    Where an empty row must not count as a row with the mean 0, use `row_means`.
    """
    kept = as_mask(mask).expand_as(values)
    count = kept.sum() if dim is None else kept.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def row_means(values: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """Mean of each row of `values` [rows, T] that has an unmasked position.

    Returns the means of those rows, in order, and how many rows were dropped as empty.
    """
    kept = as_mask(mask)
    filled = kept.any(1)
    means = masked_mean(values[filled], kept[filled], 1)
    return means, int((~filled).sum())


def masked_whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8
) -> Tensor:
    """`values` with mean 0 (the old mean where `shift_mean` is false) and variance 1 over the mask.

    The variance is the unbiased one. Masked positions are 0 in the result. Where fewer than two
    values count, or all are equal, there is nothing to normalise by: the result is the (shifted)
    mean, without a division.
    """
    kept = as_mask(mask)
    mean = masked_mean(values, kept)
    centred = torch.where(kept, values - mean, 0)
    count = kept.sum()
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    equal = (count < 2) | (_spread(values, kept) == 0)
    scaled = torch.where(equal, torch.zeros_like(centred), centred * (variance + epsilon).rsqrt())
    return scaled if shift_mean else torch.where(kept, scaled + mean, 0)


def _spread(values: Tensor, kept: Tensor) -> Tensor:
    """Largest minus smallest kept value; 0 when none is kept."""
    if values.numel() == 0:
        return values.new_zeros(())
    high = values.masked_fill(~kept, -torch.inf).max()
    low = values.masked_fill(~kept, torch.inf).min()
    return torch.where(kept.any(), high - low, 0)

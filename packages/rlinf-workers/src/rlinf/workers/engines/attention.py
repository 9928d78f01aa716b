"""Attention with grouped queries, by plain products where rows are short, else by torch's kernel.

Torch's fused kernel works one (row, head) pair at a time; on the CPU its overhead is most of the
time of a short row.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.workers.algorithms.masking import at_least_float32

__all__ = ["SHORT_KEYS", "attend", "causal_bias", "full_lanes", "length_bias", "padded_width"]

SHORT_KEYS = 256
"""Up to this many keys, and `MAX_SCORES` scores altogether, plain products are used."""
MAX_SCORES = 1 << 25
LANES = 16
MIN_PRODUCT = 400


def padded_width(width: int, depth: int) -> int:
    """To how many keys of `depth` numbers to pad: on the CPU odd widths cost more than wide ones.

    A softmax over less than a vector register takes several times as long as over a full one, and
    torch hands a product of fewer than 400 multiplications to a loop of its own.
    """
    return full_lanes(max(width, -(-MIN_PRODUCT // depth)))


def full_lanes(width: int) -> int:
    """`width` rounded up to whole vector registers of float32."""
    return -(-width // LANES) * LANES


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(D) + bias) V.

    `queries` [B, T, H, D]; `keys`, `values` [B, Hk, S, D] with H a multiple of Hk; `bias` [B or 1,
    T, S], 0 or -inf, at least one 0 a row. Returns [B, T, H, D]. Softmax in float32 at least.
    """
    rows, length, heads, depth = queries.shape
    shared, width = keys.shape[1], keys.shape[2]
    group = heads // shared
    # Heads that share a key head become further queries of it.
    grouped = queries.view(rows, length, shared, group, depth).permute(0, 2, 3, 1, 4)
    flat = grouped.reshape(rows, shared, group * length, depth)
    if width <= SHORT_KEYS and flat.numel() // depth * width <= MAX_SCORES:
        mixed = _products(flat, keys, values, bias)
    else:
        if bias is not None:
            bias = bias.repeat(1, group, 1)[:, None].to(flat.dtype)
        mixed = functional.scaled_dot_product_attention(flat, keys, values, attn_mask=bias)
    mixed = mixed.view(rows, shared, group, length, depth)
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows, length, heads, depth)


def _products(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    scores = queries @ keys.transpose(2, 3)
    scores = at_least_float32(scores) * queries.shape[-1] ** -0.5
    if bias is not None:
        rows, shared, length, width = scores.shape
        split = scores.view(rows, shared, -1, bias.shape[1], width)
        scores = (split + bias[:, None, None]).view(rows, shared, length, width)
    mixed: Tensor = scores.softmax(-1).to(values.dtype) @ values
    return mixed


def causal_bias(length: int, device: torch.device) -> Tensor:
    """[1, length, length]: each position sees itself and what is before it."""
    return torch.full((1, length, length), -torch.inf, device=device).triu(1)


def length_bias(lengths: Tensor, width: int) -> Tensor:
    """[rows, 1, width]: the first `lengths` [rows] keys of each row are seen."""
    seen = torch.arange(width, device=lengths.device) < lengths[:, None]
    return torch.zeros(seen.shape, device=lengths.device).masked_fill_(~seen, -torch.inf)[:, None]

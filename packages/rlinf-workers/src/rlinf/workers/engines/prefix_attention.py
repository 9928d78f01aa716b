"""Attention over a `PrefixBatch`: no padding between tokens, each prompt's keys computed once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.workers.engines.attention import attend, causal_bias, full_lanes, length_bias
from rlinf.workers.engines.prefix_batch import PrefixBatch, Slots

__all__ = ["Attention", "prefix_attention"]

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N, H, D], keys [N, Hk, D], values [N, Hk, D]) -> [N, H, D]."""


def prefix_attention(
    batch: PrefixBatch, record: list[tuple[Tensor, Tensor]] | None = None
) -> Attention:
    """Prompts attend to themselves, responses to their prompt and to themselves.

    With `record` the prompts' keys and values [prompts, Hk, width, D] of each layer are kept there.
    """
    device = batch.tokens.device
    prompts, inputs = batch.prompts, batch.inputs
    split = len(batch.tokens) - (
        inputs.rows * inputs.width if inputs.index is None else len(inputs.index)
    )
    prompt_bias = causal_bias(prompts.width, device)
    row_bias = _row_bias(batch) if inputs.width else None

    def attention(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        own_keys, own_values = (_heads_first(prompts, x[:split]) for x in (keys, values))
        if record is not None:
            record.append((own_keys, own_values))
        mixed = attend(prompts.spread(queries[:split]), own_keys, own_values, prompt_bias)
        flat = prompts.gather(mixed)
        if row_bias is None:
            return flat
        seen_keys, seen_values = (
            _row_block(batch, ahead, x[split:], row_bias.shape[2])
            for ahead, x in ((own_keys, keys), (own_values, values))
        )
        rows = attend(inputs.spread(queries[split:]), seen_keys, seen_values, row_bias)
        return torch.cat([flat, inputs.gather(rows)])

    return attention


def _heads_first(slots: Slots, flat: Tensor) -> Tensor:
    """[N, heads, D] -> [rows, heads, width, D]."""
    return slots.spread(flat).transpose(1, 2)


def _row_block(batch: PrefixBatch, ahead: Tensor, flat: Tensor, width: int) -> Tensor:
    """Keys or values [rows, Hk, width, D]: each prompt's, the row's own, zeros up to `width`."""
    own = _heads_first(batch.inputs, flat)
    rows, heads, length, depth = own.shape
    blank = own.new_zeros(rows, heads, width - length - ahead.shape[2], depth)
    return torch.cat([_per_row(batch, ahead), own, blank], 2)


def _per_row(batch: PrefixBatch, block: Tensor) -> Tensor:
    """The block [prompts, ...] of each response's prompt, [rows, ...]."""
    if batch.uniform:
        repeated = block[:, None].expand(-1, batch.uniform, *block.shape[1:])
        return repeated.reshape(batch.inputs.rows, *block.shape[1:])
    return block.index_select(0, batch.row_prompt)


def _row_bias(batch: PrefixBatch) -> Tensor:
    """[rows or 1, T, width]: a response sees all of its prompt, then causally itself."""
    device = batch.tokens.device
    length = batch.inputs.width
    width = batch.prompts.width + length
    blank = (0, full_lanes(width) - width)
    own = functional.pad(causal_bias(length, device), blank, value=-torch.inf)
    if batch.prompts.index is None:
        ahead = torch.zeros(1, length, batch.prompts.width, device=device)
        return torch.cat([ahead, own], 2)
    rows = length_bias(batch.prompt_lengths[batch.row_prompt], batch.prompts.width)
    return torch.cat([rows.expand(-1, length, -1), own.expand(len(rows), -1, -1)], 2)

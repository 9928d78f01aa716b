"""Log-probs where each rank has the logits of a part of the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["split_logprobs"]


def split_logprobs(logits: Tensor, tokens: Tensor, first: int, group: Any) -> Tensor:
    """Log-probs [R] of `tokens` [R]; differentiable, the same on every rank of `group`.

    Args:
        logits: This rank's columns [R, v] in float32 at least; -inf for what cannot be drawn.
        tokens: int64, in the numbering of the whole vocabulary.
        first: Number of this rank's first column.
        group: The ranks that have the other columns.

    Three numbers a row go between ranks: the largest logit, the sum of exponentials and the
    logit of the token; as in Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    found: Tensor = _SplitLogprobs.apply(logits, tokens, first, group)  # type: ignore[no-untyped-call]
    return found


class _SplitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, first: int, group: Any) -> Tensor:
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        shares = (logits - top[:, None]).exp()
        total = shares.sum(-1)
        own = tokens - first
        here = (own >= 0) & (own < logits.shape[1])
        own = own.clamp(0, logits.shape[1] - 1)
        picked = torch.where(here, logits.gather(1, own[:, None])[:, 0] - top, 0)
        dist.all_reduce(total, group=group)
        dist.all_reduce(picked, group=group)
        ctx.save_for_backward(shares / total[:, None], own, here)
        return picked - total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, here = ctx.saved_tensors
        found = -probabilities * grad[:, None]
        found.scatter_add_(1, own[:, None], torch.where(here, grad, 0)[:, None])
        return found, None, None, None

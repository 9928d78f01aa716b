"""Actions as tokens: each number of an action is one of so many values between its bounds.

Pure functions over logits [B, C, A, bins] of a chunk of C actions of A numbers.
"""

import torch
from torch import Tensor

__all__ = ["evaluate_tokens", "sample_tokens", "token_values"]


def token_values(low: tuple[float, ...], high: tuple[float, ...], bins: int) -> Tensor:
    """What each token means, float32 [A, bins]: evenly spread, the bounds included."""
    first, last = torch.tensor(low)[:, None], torch.tensor(high)[:, None]
    return first + (last - first) * torch.linspace(0, 1, bins)


def sample_tokens(logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B, C, A] by the inverse of the distribution function, and their log-prob [B].

    `noise` [B, C * A] is uniform in [0, 1); None: the likeliest tokens.
    """
    logprobs = logits.log_softmax(-1)
    if noise is None:
        tokens = logprobs.argmax(-1)
    else:
        reached = logprobs.exp().cumsum(-1) <= noise.view(*logits.shape[:-1], 1)
        tokens = reached.sum(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[..., None])[..., 0].sum((1, 2))


def evaluate_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob [B] of a chunk's tokens together, and the sum of their entropies [B]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.long()[..., None])[..., 0].sum((1, 2))
    entropy = -(logprobs.exp() * logprobs).sum((1, 2, 3))
    return chosen, entropy

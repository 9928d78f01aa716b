"""Drawing tokens, with random numbers that belong to a token and not to a batch.

The random number of a token is a hash of (seed, request, sample, position). So a response is the
same in whatever batch, order or process it is drawn, as long as the logits are the same.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlinf.workers.algorithms.masking import at_least_float32
from rlinf.workers.roles.rollout import Sampling

__all__ = ["adjusted", "draw", "streams", "token_logprobs", "uniforms"]

UintArray = npt.NDArray[np.uint64]

_BITS = 23
"""Fewer than float32's 24: so `uniform * total` always rounds to less than `total`."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def streams(seed: int, uid: str, samples: int) -> UintArray:
    """One independent stream of random numbers a sample, uint64 [samples]."""
    digest = hashlib.blake2b(f"{seed}\0{uid}".encode(), digest_size=8).digest()
    base = np.frombuffer(digest, np.uint64)
    return _mixed(base + np.arange(1, samples + 1, dtype=np.uint64) * _GOLDEN)


def uniforms(stream: UintArray, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Number `positions` [rows] of each stream [rows], float32 in [0, 1)."""
    mixed = _mixed(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def _mixed(x: UintArray) -> UintArray:
    """The finaliser of SplitMix64: Steele, Lea and Flood 2014, "Fast splittable PRNGs"."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UintArray = x ^ (x >> np.uint64(31))
    return mixed


def adjusted(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [.., V] in float32 at least, at the temperature, with banned tokens at -inf."""
    logits = at_least_float32(logits)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.banned_ids:
        banned = torch.tensor(sampling.banned_ids, device=logits.device)
        logits = logits.index_fill(-1, banned, -torch.inf)
    return logits


def token_logprobs(logits: Tensor, source: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs [R] of `tokens` [R] under rows `source` [R] of `logits` [M, V]; differentiable.

    The kind is `full`: what a rollout records when it is asked for `Sampling.logprobs="full"`.
    """
    logits = adjusted(logits, sampling)
    total = logits.logsumexp(-1)
    return logits[source, tokens] - total.index_select(0, source)


def draw(logits: Tensor, sampling: Sampling, random: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row from logits [rows, V] by inverting the cumulative distribution at `random`.

    `random` [rows] is uniform in [0, 1). Returns the tokens, int64 [rows], and their log-probs of
    the kind that `sampling.logprobs` asks for, float32 [rows].
    """
    logprobs = adjusted(logits, sampling).log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1, keepdim=True)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
    kept = _truncated(logprobs, sampling)
    cumulative = kept.exp().cumsum(-1)
    target = (random * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True)
    recorded = kept if sampling.logprobs == "processed" else logprobs
    return tokens[:, 0], recorded.gather(1, tokens)[:, 0]


def _truncated(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Renormalised log-probs after top-k, then top-p; -inf for what is cut off.

    Top-p keeps the smallest set of likeliest tokens that holds at least that mass: Holtzman et al.
    2019, arXiv:1904.09751. Ties at its border are kept together.
    """
    if 0 < sampling.top_k < logprobs.shape[-1]:
        border = logprobs.topk(sampling.top_k, -1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < border, -torch.inf).log_softmax(-1)
    if sampling.top_p < 1:
        ordered = logprobs.sort(-1, descending=True).values
        before = ordered.exp().cumsum(-1) - ordered.exp()
        border = ordered.masked_fill(before >= sampling.top_p, torch.inf).amin(-1, keepdim=True)
        logprobs = logprobs.masked_fill(logprobs < border, -torch.inf).log_softmax(-1)
    return logprobs

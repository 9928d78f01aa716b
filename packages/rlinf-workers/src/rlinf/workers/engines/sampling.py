"""Drawing tokens, with random numbers that belong to a token and not to a batch.

The random number of a token is a hash of (seed, request, sample, position). So a response is the
same in whatever batch, order or process it is drawn, as long as the logits are the same.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from rlinf.workers.algorithms.masking import at_least_float32
from rlinf.workers.roles.rollout import Sampling

__all__ = ["adjusted", "draw", "streams", "token_logprobs", "uniforms"]

BLOCK = 128
"""Columns that are summed up before one of them is looked for."""
UintArray = npt.NDArray[np.uint64]

_BITS = 23
"""Fewer than float32's 24: so `uniform * total` always rounds to less than `total`."""
_BELOW_ONE = 1 - 2.0**-_BITS
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
    logits = adjusted(logits, sampling)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], (logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True))[:, 0]
    shares = logits.softmax(-1)
    kept = _truncated(shares, sampling)
    tokens = (_inverted if kept.shape[1] <= 2 * BLOCK else _inverted_by_blocks)(kept, random)
    drawn = shares.gather(1, tokens[:, None])[:, 0]
    if sampling.logprobs == "processed" and kept is not shares:
        drawn = drawn / kept.sum(-1)
    return tokens, drawn.log()


def _inverted(shares: Tensor, random: Tensor) -> Tensor:
    """The first column at which the running sum of shares [rows, V] exceeds `random` of its end."""
    cumulative = shares.cumsum(-1)
    target = random[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _inverted_by_blocks(shares: Tensor, random: Tensor) -> Tensor:
    """The same, first over sums of blocks, then within one: running sums are slow, sums are not."""
    rows, columns = shares.shape
    blocks = functional.pad(shares, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1)
    target = random[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True)
    size = sums.gather(1, chosen)
    rest = (target - cumulative.gather(1, chosen) + size) / size
    block = blocks[torch.arange(rows, device=shares.device), chosen[:, 0]]
    return chosen[:, 0] * BLOCK + _inverted(block, rest[:, 0].clamp(0, _BELOW_ONE))


def _truncated(shares: Tensor, sampling: Sampling) -> Tensor:
    """Shares [rows, V] after top-k, top-p and min-p, in this order; 0 for what is cut off.

    Top-p keeps the smallest set of likeliest tokens that holds at least that part of what top-k
    left: Holtzman et al. 2019, arXiv:1904.09751. Min-p keeps what has at least that part of the
    likeliest token's share: Nguyen et al. 2024, arXiv:2407.01082. Ties at a border are kept.
    """
    if 0 < sampling.top_k < shares.shape[-1]:
        border = shares.topk(sampling.top_k, -1).values[:, -1:]
        shares = shares.masked_fill(shares < border, 0)
    if sampling.top_p < 1:
        ordered = shares.sort(-1, descending=True).values
        cumulative = ordered.cumsum(-1)
        cut = cumulative - ordered >= sampling.top_p * cumulative[:, -1:]
        border = ordered.masked_fill(cut, torch.inf).amin(-1, keepdim=True)
        shares = shares.masked_fill(shares < border, 0)
    if sampling.min_p > 0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.amax(-1, keepdim=True), 0)
    return shares

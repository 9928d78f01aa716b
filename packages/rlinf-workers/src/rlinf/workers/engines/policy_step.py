"""The parts of a policy step that every trainer shares: what is trained on, and its loss.

Whoever runs the model asks `settle` which rows have something to teach, cuts them, and gives the
log-probs of each micro-batch to `policy_loss`. Sums are never divided here, so the parts of a step
can be added, over micro-batches and over ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlinf.workers.algorithms.functions import POLICY_LOSSES
from rlinf.workers.algorithms.kl import kl
from rlinf.workers.algorithms.losses import importance_weights, reduce
from rlinf.workers.algorithms.masking import masked_sum
from rlinf.workers.engines.policy_batch import (
    MicroBatch,
    TrainRows,
    advantages_of,
    counted,
    padded,
    per_token,
    shaped,
    train_rows,
)
from rlinf.workers.engines.prefix_batch import PrefixBatch, Rows
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.reward import ScoredGroup
from rlinf.workers.roles.rollout import IntArray, Sampling
from rlinf.workers.roles.trainer import PartialStats

__all__ = ["Pair", "policy_loss", "settle", "supervised_rows"]

Pair = tuple[IntArray, IntArray]
"""A prompt and the response that is to be learnt."""


def settle(
    groups: Sequence[ScoredGroup], config: TrainerConfig, version: int, *, frozen: bool = False
) -> tuple[list[TrainRows], PartialStats]:
    """Give groups their advantages: the rows to train on, and what was counted in them.

    Args:
        version: Of the weights that are to learn from them.
        frozen: Nothing is trained on: there are no rows.

    Raises:
        ConfigError: The loss needs what the groups do not have.
    """
    if config.overlong is not None:
        groups = shaped(groups, config.overlong, config.limit)
    found: list[TrainRows] = []
    parts = PartialStats()
    everything = config.kl_coefficient > 0
    for group, given in zip(groups, advantages_of(groups, config.advantage), strict=True):
        stale = _stale(group, config.max_staleness, version)
        rows = train_rows(group, given, skip=stale, all_rows=everything)
        parts += counted(group, rows, version)
        parts += PartialStats(stale=int(stale.sum()))
        if rows is not None and not frozen:
            _require_known_ratio(rows.sampling, config)
            found.append(rows)
    if config.normalisation.kind == "constant":
        # Samples without a gradient are samples still.
        parts = replace(parts, weight=float(parts.dropped))
    return found, parts


def policy_loss(
    micro: MicroBatch, batch: PrefixBatch, logprobs: Tensor, config: TrainerConfig
) -> tuple[Tensor, PartialStats]:
    """The summed loss of a micro-batch, which has the gradient, and what was counted in it.

    Args:
        batch: The layout of `micro`.
        logprobs: float32 [R], of its response tokens.
    """
    layout, device = batch.responses, logprobs.device
    wide = layout.spread(logprobs)
    mask = padded([p.mask.astype(np.float32) for p in micro], layout.width, device) != 0
    rollout = padded([part.logprobs for part in micro], layout.width, device)
    old = _old(micro, wide, config, rollout)
    advantages = per_token(micro, layout.width, device)
    loss = POLICY_LOSSES[config.loss](wide, old, advantages, mask, config.clip)
    cap = config.importance_cap
    weights = None if cap is None else importance_weights(old, rollout, cap)
    weighed = loss.loss if weights is None else loss.loss * weights
    penalised = weighed + _penalty(micro, wide, config)
    total, weight = reduce(penalised, mask, config.divisor)
    drift = kl(rollout, wide.detach(), "k3")
    deviation = torch.where(mask, (loss.ratio - 1).abs(), 0).max()
    return total, PartialStats(
        loss=float(total.detach()),
        weight=float(weight),
        clipped=int((loss.clipped & mask).sum()),
        truncated=0 if weights is None else int(((weights == cap) & mask).sum()),
        kl=float(masked_sum(drift, mask)),
        ratio_deviation=float(deviation),
    )


def supervised_rows(pairs: Sequence[Pair]) -> list[Rows]:
    """Each pair as a prompt with one response."""
    return [
        (prompt, response[None], np.array([len(response)], np.int32)) for prompt, response in pairs
    ]


def _stale(group: ScoredGroup, limit: int | None, version: int) -> npt.NDArray[np.bool_]:
    """Which samples are too old to be trained on, bool [n]."""
    behind = version - group.group.versions
    return np.asarray(np.zeros(len(behind), bool) if limit is None else behind > limit)


def _old(micro: MicroBatch, logprobs: Tensor, config: TrainerConfig, rollout: Tensor) -> Tensor:
    """Log-probs [rows, T] of the policy that the ratio compares with."""
    if config.old_logprobs == "rollout":
        return rollout
    if config.old_logprobs == "trainer":
        return logprobs.detach()
    known = [part.old for part in micro if part.old is not None]
    if len(known) < len(micro):
        raise ConfigError("old_logprobs=inference, but groups came without old_logprobs")
    return padded(known, logprobs.shape[1], logprobs.device)


def _penalty(micro: MicroBatch, logprobs: Tensor, config: TrainerConfig) -> Tensor:
    if not config.kl_coefficient:
        return logprobs.new_zeros(())
    references = [part.reference for part in micro if part.reference is not None]
    if len(references) < len(micro):
        raise ConfigError("kl_coefficient is set, but groups came without reference_logprobs")
    reference = padded(references, logprobs.shape[1], logprobs.device)
    return config.kl_coefficient * kl(logprobs, reference, config.kl_kind)


def _require_known_ratio(sampling: Sampling, config: TrainerConfig) -> None:
    truncated = sampling.top_k or sampling.top_p < 1
    recorded = sampling.logprobs == "processed" and truncated
    if recorded and config.old_logprobs == "rollout":
        raise ConfigError(
            "the rollout recorded log-probs after top-k/top-p, the trainer computes those of "
            "the full softmax: sample with logprobs=full, or train with old_logprobs=trainer"
        )

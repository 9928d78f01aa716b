"""From scored groups to micro-batches: advantages, which rows are trained on, how they are cut."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlinf.workers.algorithms.advantages import grpo, leave_one_out
from rlinf.workers.engines.prefix_batch import Rows
from rlinf.workers.roles.reward import STATUSES, ScoredGroup
from rlinf.workers.roles.rollout import FloatArray, Sampling
from rlinf.workers.roles.trainer import PartialStats

__all__ = [
    "AdvantageKind",
    "MicroBatch",
    "TrainRows",
    "advantages_of",
    "counted",
    "cut",
    "padded",
    "train_rows",
]

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainRows:
    """Those samples of one group that have something to teach: T is the group's width.

    Attributes:
        rows: The prompt, the responses [n, T] and their lengths.
        advantages: float32 [n], none of them 0.
        logprobs: float32 [n, T], of the rollout.
        reference: float32 [n, T] of a reference policy, or None.
        sampling: How they were drawn.
    """

    rows: Rows
    advantages: FloatArray
    logprobs: FloatArray
    reference: FloatArray | None
    sampling: Sampling

    @property
    def cost(self) -> tuple[int, int]:
        """Tokens that go through the layers (padded), and tokens that are predicted."""
        prompt, tokens, lengths = self.rows
        return len(prompt) + tokens.size, int(lengths.sum())

    def part(self, start: int, end: int) -> "TrainRows":
        """Some of the rows."""
        prompt, tokens, lengths = self.rows
        return TrainRows(
            (prompt, tokens[start:end], lengths[start:end]),
            self.advantages[start:end],
            self.logprobs[start:end],
            None if self.reference is None else self.reference[start:end],
            self.sampling,
        )


MicroBatch = list[TrainRows]
"""Rows of equal `sampling` that go through the model together."""


def advantages_of(groups: Sequence[ScoredGroup], kind: AdvantageKind) -> list[FloatArray]:
    """The advantages each group came with, or those its rewards give; 0 for unscored samples."""
    found: list[FloatArray] = [np.zeros(group.group.n, np.float32) for group in groups]
    sizes: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        if group.advantages is not None:
            found[place] = np.where(group.scored, group.advantages, np.float32(0))
        else:
            sizes.setdefault(group.group.n, []).append(place)
    for places in sizes.values():
        rewards = torch.from_numpy(np.stack([groups[i].rewards for i in places]))
        scored = torch.from_numpy(np.stack([groups[i].scored for i in places]))
        if kind == "rloo":
            computed = leave_one_out(rewards, scored)
        else:
            computed = grpo(rewards, scored, scale=kind == "grpo")
        for place, advantages in zip(places, computed.numpy(), strict=True):
            found[place] = advantages
    return found


def train_rows(group: ScoredGroup, advantages: FloatArray) -> TrainRows | None:
    """The rows of a group to train on; None when there is none.

    A row with the advantage 0 has no gradient and is not worth a forward pass; nor has one without
    tokens.
    """
    inner = group.group
    kept = np.flatnonzero((advantages != 0) & (inner.lengths > 0))
    if not len(kept):
        return None
    reference = group.reference_logprobs
    return TrainRows(
        (inner.prompt_ids, inner.tokens[kept], inner.lengths[kept]),
        advantages[kept],
        inner.logprobs[kept],
        None if reference is None else reference[kept],
        inner.sampling,
    )


def counted(group: ScoredGroup, kept: TrainRows | None, version: int) -> PartialStats:
    """What there is to count in a group before anything is computed."""
    scored = group.scored
    rows = 0 if kept is None else len(kept.advantages)
    return PartialStats(
        reward=float(group.rewards[scored].sum()),
        scored=int(scored.sum()),
        unscored=int((~scored).sum()),
        format_errors=int((group.status == STATUSES.index("format_error")).sum()),
        rows=rows,
        dropped=group.group.n - rows,
        tokens=group.token_count,
        trained_tokens=0 if kept is None else int(kept.rows[2].sum()),
        staleness=version - int(group.group.versions.min()),
    )


def cut(groups: Iterable[TrainRows], max_tokens: int, max_outputs: int) -> Iterator[MicroBatch]:
    """Fill micro-batches up to a number of tokens (padded) and of predicted tokens.

    Groups of similar length come together; one that is too large by itself is split by rows. The
    result of a step does not depend on these cuts.
    """
    kinds: dict[Sampling, list[TrainRows]] = {}
    for group in groups:
        kinds.setdefault(group.sampling, []).append(group)
    for alike in kinds.values():
        alike.sort(key=lambda group: group.rows[1].shape[1])
        batch: MicroBatch = []
        room = (max_tokens, max_outputs)
        for group in _split(alike, max_tokens, max_outputs):
            need = group.cost
            if batch and (need[0] > room[0] or need[1] > room[1]):
                yield batch
                batch, room = [], (max_tokens, max_outputs)
            batch.append(group)
            room = (room[0] - need[0], room[1] - need[1])
        if batch:
            yield batch


def _split(groups: Sequence[TrainRows], max_tokens: int, max_outputs: int) -> Iterator[TrainRows]:
    for group in groups:
        prompt, tokens, _ = group.rows
        width = max(tokens.shape[1], 1)
        fitting = min((max_tokens - len(prompt)) // width, max_outputs // width)
        size = max(1, fitting)
        for start in range(0, len(tokens), size):
            yield group.part(start, start + size)


def padded(parts: Sequence[npt.NDArray[np.float32]], width: int, device: torch.device) -> Tensor:
    """Blocks [n, T] below each other, float32 [rows, width], 0 where a block is narrower."""
    rows = sum(len(part) for part in parts)
    wide = np.zeros((rows, width), np.float32)
    start = 0
    for part in parts:
        taken = part[:, :width]
        wide[start : start + len(part), : taken.shape[1]] = taken
        start += len(part)
    return torch.from_numpy(wide).to(device)

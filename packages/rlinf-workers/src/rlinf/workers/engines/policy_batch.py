"""From scored groups to micro-batches: advantages, which rows are trained on, how they are cut."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlinf.workers.algorithms.advantages import reinforce_plus_plus
from rlinf.workers.algorithms.functions import GROUP_ADVANTAGES
from rlinf.workers.algorithms.masking import masked_whiten
from rlinf.workers.algorithms.parts import AdvantageKind, Overlong
from rlinf.workers.algorithms.shaping import overlong_penalty
from rlinf.workers.engines.prefix_batch import Rows
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.episode import EpisodeStats
from rlinf.workers.roles.reward import STATUSES, ScoredGroup
from rlinf.workers.roles.rollout import FloatArray, Sampling
from rlinf.workers.roles.trainer import PartialStats

__all__ = [
    "MicroBatch",
    "TrainRows",
    "advantages_of",
    "counted",
    "cut",
    "padded",
    "per_token",
    "pieces",
    "runs",
    "shaped",
    "train_rows",
]


HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class TrainRows:
    """Those samples of one group that have something to teach: T is the group's width.

    Attributes:
        rows: The prompt, the responses [n, T] and their lengths.
        advantages: float32 [n, T], or [n, 1] for one a response.
        mask: bool [n, T], the tokens that are trained on.
        logprobs: float32 [n, T], of the rollout.
        reference: float32 [n, T] of a reference policy, or None.
        old: float32 [n, T] of the policy before the step, or None.
        sampling: How they were drawn.
    """

    rows: Rows
    advantages: FloatArray
    mask: npt.NDArray[np.bool_]
    logprobs: FloatArray
    reference: FloatArray | None
    old: FloatArray | None
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
            self.mask[start:end],
            self.logprobs[start:end],
            None if self.reference is None else self.reference[start:end],
            None if self.old is None else self.old[start:end],
            self.sampling,
        )


MicroBatch = list[TrainRows]
"""Rows of equal `sampling` that go through the model together."""


def shaped(groups: Sequence[ScoredGroup], overlong: Overlong, limit: int) -> list[ScoredGroup]:
    """The groups with the penalty of long responses in their rewards.

    Rewards that are all equal stay so: a group with nothing to choose from has nothing to teach.
    """
    found = []
    for group in groups:
        penalty = overlong_penalty(torch.from_numpy(group.group.written_lengths), limit, overlong)
        rewards = group.rewards + penalty.numpy().astype(np.float32)
        found.append(replace(group, rewards=rewards) if group.informative else group)
    return found


def advantages_of(groups: Sequence[ScoredGroup], kind: AdvantageKind) -> list[FloatArray]:
    """The advantages of each group, float32 [n] or [n, T]; 0 for unscored samples.

    Those that a group came with are used as they are, by `gae` whitened. `reinforce++` and `gae`
    look at all groups together, so all of a step must be given. Raises `ConfigError` for `gae`
    without advantages.
    """
    if kind in GROUP_ADVANTAGES:
        return _within_groups(groups, kind)
    return _over_the_batch(groups, kind)


def _within_groups(groups: Sequence[ScoredGroup], kind: AdvantageKind) -> list[FloatArray]:
    found: list[FloatArray] = [np.zeros(group.group.n, np.float32) for group in groups]
    sizes: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        if group.advantages is not None:
            kept = group.scored if group.advantages.ndim == 1 else group.scored[:, None]
            found[place] = np.where(kept, group.advantages, np.float32(0))
        else:
            sizes.setdefault(group.group.n, []).append(place)
    for places in sizes.values():
        rewards = torch.from_numpy(np.stack([groups[i].rewards for i in places]))
        scored = torch.from_numpy(np.stack([groups[i].scored for i in places]))
        computed = GROUP_ADVANTAGES[kind](rewards, scored)
        for place, advantages in zip(places, computed.numpy(), strict=True):
            found[place] = advantages
    return found


def _over_the_batch(groups: Sequence[ScoredGroup], kind: AdvantageKind) -> list[FloatArray]:
    if not groups:
        return []
    width = max(group.group.tokens.shape[1] for group in groups)
    mask = padded([g.learnable.astype(np.float32) for g in groups], width, HOST) != 0
    if kind == "gae":
        if any(group.advantages is None for group in groups):
            raise ConfigError("advantage=gae needs a critic, but groups came without advantages")
        given = [g.advantages for g in groups if g.advantages is not None]
        whitened = masked_whiten(padded(given, width, HOST).double(), mask)
    else:
        rewards = padded([group.token_rewards for group in groups], width, HOST)
        whitened = reinforce_plus_plus(rewards.double(), mask)
    flat = whitened.float().numpy()
    ends = np.cumsum([group.group.n for group in groups])
    return [
        rows[:, : group.group.tokens.shape[1]]
        for rows, group in zip(np.split(flat, ends[:-1]), groups, strict=True)
    ]


def train_rows(
    group: ScoredGroup,
    advantages: FloatArray,
    *,
    skip: npt.NDArray[np.bool_],
    all_rows: bool = False,
) -> TrainRows | None:
    """The rows of a group to train on; None when there is none.

    None of `skip`, bool [n]. A row without a token to train on is not worth a forward pass; nor,
    except with `all_rows` (a KL penalty moves them too), is one whose advantages are 0.
    """
    inner = group.group
    wide = advantages[:, None] if advantages.ndim == 1 else advantages
    kept = np.flatnonzero(~skip & group.learnable.any(1) & (all_rows | (wide != 0).any(1)))
    if not len(kept):
        return None
    reference, old = group.reference_logprobs, group.old_logprobs
    return TrainRows(
        (inner.prompt_ids, inner.tokens[kept], inner.lengths[kept]),
        wide[kept],
        group.learnable[kept],
        inner.logprobs[kept],
        None if reference is None else reference[kept],
        None if old is None else old[kept],
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
        informative=int(group.informative),
        rows=rows,
        dropped=group.group.n - rows,
        tokens=group.token_count,
        trained_tokens=0 if kept is None else int(kept.mask.sum()),
        staleness=version - int(group.group.versions.min()),
        mixed=group.group.mixed,
        episodes=EpisodeStats.of(group.group.episodes),
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


def pieces(groups: Iterable[TrainRows], max_tokens: int) -> Iterator[TrainRows]:
    """The groups, those with more tokens than that cut by rows; each part has a row at least."""
    return _split(list(groups), max_tokens, max_tokens)


def runs(groups: Sequence[ScoredGroup], max_tokens: int) -> Iterator[list[ScoredGroup]]:
    """Runs of groups, in order, of at most so many tokens (prompts once, responses padded).

    A group that has more by itself is a run of its own.
    """
    run: list[ScoredGroup] = []
    room = max_tokens
    for group in groups:
        need = len(group.group.prompt_ids) + group.group.tokens.size
        if run and need > room:
            yield run
            run, room = [], max_tokens
        run.append(group)
        room -= need
    if run:
        yield run


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


def per_token(micro: MicroBatch, width: int, device: torch.device) -> Tensor:
    """The advantages of a micro-batch, float32 [rows, 1] or [rows, width]."""
    parts = [part.advantages for part in micro]
    if all(part.shape[1] == 1 for part in parts):
        return padded(parts, 1, device)
    wide = [np.broadcast_to(p, (len(p), width)) if p.shape[1] == 1 else p for p in parts]
    return padded(wide, width, device)

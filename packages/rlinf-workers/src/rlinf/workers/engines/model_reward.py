"""Rewards from a model that reads the prompt and the response as token ids."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rlinf.workers.engines.parameters import OneDevice
from rlinf.workers.roles.reward import RewardModel, Score, ScoredGroup
from rlinf.workers.roles.rollout import Group, IntArray

__all__ = ["ModelReward", "SequenceClassifier"]


class ModelReward:
    """A `RewardEngine` around a `RewardModel`. A value that is not finite is `unscored`."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One verdict a sample. See `RewardEngine`."""
        rows = [(group.prompt_ids, group.response(i)) for group in groups for i in range(group.n)]
        scores = map(_score, self._model.score(rows))
        return [ScoredGroup.of(group, [next(scores) for _ in range(group.n)]) for group in groups]


class SequenceClassifier(OneDevice):
    """A `RewardModel`: a transformers `...ForSequenceClassification` with one label.

    It must have the tokenizer of the policy: ids are what it reads, no text is tokenised again.
    Rows of similar length are read together, at most `batch_tokens` (padded) at a time.
    """

    def __init__(self, model: nn.Module, batch_tokens: int = 16384) -> None:
        config: Any = model.config
        if config.num_labels != 1:
            raise ValueError(f"a reward model has one label, this one has {config.num_labels}")
        if config.pad_token_id is None:
            raise ValueError("the model has no pad_token_id: set it in its configuration")
        self._model: Any = model.eval()
        self._pad: int = config.pad_token_id
        self._tokens = batch_tokens
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def score(self, rows: Sequence[tuple[IntArray, IntArray]]) -> list[float]:
        """See `RewardModel`."""
        found = [0.0] * len(rows)
        lengths = [len(prompt) + len(response) for prompt, response in rows]
        for places in _batches(lengths, self._tokens):
            width = max(1, max(lengths[i] for i in places))
            ids = torch.full((len(places), width), self._pad)
            mask = torch.zeros(len(places), width, dtype=torch.long)
            for row, i in enumerate(places):
                whole = torch.cat([torch.from_numpy(part).long() for part in rows[i]])
                # On the left: the last place is then the end of every row.
                ids[row, width - len(whole) :] = whole
                mask[row, width - len(whole) :] = 1
            values = self._values(ids.to(self._device), mask.to(self._device))
            for i, value in zip(places, values, strict=True):
                found[i] = value
        return found

    def _values(self, ids: torch.Tensor, mask: torch.Tensor) -> list[float]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        body = self._model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        )
        # Not by the module's own forward, which looks for the last token that is no padding: a
        # response may end with that very token.
        values: list[float] = self._model.score(body.last_hidden_state[:, -1])[:, 0].tolist()
        return values

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    batch: list[int] = []
    for index in order:
        if batch and lengths[index] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score(value: float) -> Score:
    return Score(value) if math.isfinite(value) else Score(0.0, "unscored")

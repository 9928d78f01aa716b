"""What an engine needs of a model: logits for training, and decoding against a cache."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.masking import at_least_float32
from rlinf.workers.engines.decoder import Decoder, reason_unsupported
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.roles.rollout import IntArray

__all__ = ["Backbone", "Cache", "TransformersBackbone", "backbone_of"]


class Cache(Protocol):
    """Keys and values of the rows being decoded."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    def select(self, rows: Tensor, steps: int) -> Self:
        """These rows, in this order, each as often as it is named; `steps` more will follow."""

    def join(self, other: Self) -> Self:
        """These rows, then the other's; only where the backbone's `can_join` is true."""


class Backbone(Protocol):
    """A model, seen through the two things that are done with it."""

    model: nn.Module
    can_join: bool
    """Whether rows can be added while others are being decoded."""

    @property
    def bytes_per_token(self) -> int:
        """Cache memory of one position of one row."""

    def logits(self, batch: PrefixBatch) -> tuple[Tensor, Tensor]:
        """float32 [M, V], and int64 [R]: which of them predicts each response token of `batch`."""

    def hidden(self, batch: PrefixBatch) -> tuple[Tensor, Tensor]:
        """The same before the output layer: [M, d] after the last norm, and int64 [R]."""

    def prefill(self, prompts: Sequence[IntArray]) -> tuple[Tensor, Any]:
        """Read prompts: the logits after each, float32 [prompts, V], and a `Cache`."""

    def decode(self, tokens: Tensor, cache: Any) -> Tensor:
        """Append a token [rows] to each row: the logits after it, float32 [rows, V]."""


def backbone_of(model: nn.Module) -> Backbone:
    """The fastest backbone that can run `model`, which is put into eval mode (no dropout)."""
    model.eval()
    return TransformersBackbone(model) if reason_unsupported(model) else Decoder(model)


class TransformersBackbone:
    """Any transformers causal LM, by its own forward. Slower: prompts are not shared in training.

    Rows are [prompt, padding, response]; the padding is masked and no position is counted for it.
    """

    can_join = False

    def __init__(self, model: Any) -> None:
        self.model: nn.Module = model
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def bytes_per_token(self) -> int:
        """Cache memory of one position of one row, if every layer keeps keys and values."""
        config: Any = self.model.config
        size = next(self.model.parameters()).element_size()
        return int(2 * config.num_hidden_layers * config.hidden_size * size)

    def logits(self, batch: PrefixBatch) -> tuple[Tensor, Tensor]:
        """See `Backbone`; one row of logits a response token."""
        inputs, rows, places = self._rows(batch)
        output: Any = self.model(**inputs)
        return at_least_float32(output.logits[rows, places]), torch.arange(
            len(rows), device=rows.device
        )

    def hidden(self, batch: PrefixBatch) -> tuple[Tensor, Tensor]:
        """See `Backbone`; one row a response token."""
        inputs, rows, places = self._rows(batch)
        body: Any = self.model.base_model
        return body(**inputs).last_hidden_state[rows, places], torch.arange(
            len(rows), device=rows.device
        )

    def _rows(self, batch: PrefixBatch) -> tuple[dict[str, Any], Tensor, Tensor]:
        """What the module reads, and where in its output each response token is predicted."""
        device = batch.tokens.device
        width, length = batch.prompts.width, batch.responses.width
        prompt_tokens = len(batch.tokens) - len(batch.outputs) + batch.prompts.rows
        prompts = batch.prompts.spread(batch.tokens[:prompt_tokens])[batch.row_prompt]
        responses = batch.responses.spread(batch.targets)
        sizes = batch.prompt_lengths[batch.row_prompt][:, None]
        columns = torch.arange(width + length, device=device)[None]
        mask = (columns < sizes) | (columns >= width)
        inputs = {
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask.long(),
            "position_ids": torch.where(columns < width, columns, columns - width + sizes),
            "use_cache": False,
        }
        within = torch.arange(length, device=device)[None].expand(len(sizes), -1)
        places = torch.where(within == 0, sizes - 1, width + within - 1)
        numbers = torch.arange(len(sizes), device=device)[:, None].expand(-1, length)
        return inputs, batch.responses.gather(numbers), batch.responses.gather(places)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[IntArray]) -> tuple[Tensor, "_ModuleCache"]:
        """See `Backbone`."""
        from transformers import DynamicCache

        device = next(self.model.parameters()).device
        nothing = prompts[0][:0]
        batch = PrefixBatch.of([(p, nothing.reshape(0, 1), nothing) for p in prompts], device)
        mask = torch.arange(batch.prompts.width, device=device) < batch.prompt_lengths[:, None]
        cache = _ModuleCache(DynamicCache(config=self.model.config), mask.long())
        positions = (cache.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(batch.prompts.spread(batch.tokens), positions, cache)
        return logits[torch.arange(len(prompts)), batch.prompt_lengths - 1], cache

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: "_ModuleCache") -> Tensor:
        """See `Backbone`."""
        positions = cache.mask.sum(1, keepdim=True)
        cache.mask = torch.cat([cache.mask, torch.ones_like(cache.mask[:, :1])], 1)
        return self._forward(tokens[:, None], positions, cache)[:, -1]

    def _forward(self, tokens: Tensor, positions: Tensor, cache: "_ModuleCache") -> Tensor:
        output: Any = self.model(
            input_ids=tokens,
            attention_mask=cache.mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache.inner},
        )
        logits: Tensor = output.logits
        return at_least_float32(logits)


class _ModuleCache:
    """A transformers cache and the mask [rows, width] of what counts in it."""

    def __init__(self, inner: Any, mask: Tensor) -> None:
        self.inner = inner
        self.mask = mask

    @property
    def rows(self) -> int:
        return len(self.mask)

    def select(self, rows: Tensor, steps: int) -> "_ModuleCache":
        self.inner.batch_select_indices(rows)
        return _ModuleCache(self.inner, self.mask[rows])

    def join(self, other: "_ModuleCache") -> "_ModuleCache":
        raise NotImplementedError("rows are added to this backbone only between calls")

"""The forward pass of Llama-shaped models over a transformers module's own parameters.

One pass serves three uses, which differ in attention alone: reading prompts, decoding a token a row
against a cache, and training on responses that share prompts. It equals the module's own forward to
rounding. It is there because that one spends most of a short step outside of arithmetic, and cannot
share a prompt among its responses.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.workers.algorithms.masking import at_least_float32
from rlinf.workers.engines.attention import attend
from rlinf.workers.engines.generate_config import STABLE_ROWS
from rlinf.workers.engines.kv_cache import KvCache
from rlinf.workers.engines.prefix_attention import Attention, prefix_attention
from rlinf.workers.engines.prefix_batch import PrefixBatch, Slots
from rlinf.workers.engines.products import project

__all__ = ["Decoder", "reason_unsupported"]


def reason_unsupported(model: nn.Module) -> str:
    """Why `Decoder` cannot run `model`; empty when it can."""
    config: Any = getattr(model, "config", None)
    kinds = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    if type(model).__name__ not in kinds:
        return f"{type(model).__name__} is none of Llama, Qwen2 and Qwen3"
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        return f"its layers are of the kinds {sorted(layer_types)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return "its rotary embedding depends on the length of the sequence"
    if config.attention_dropout:
        return "it has attention dropout"
    return ""


class Decoder:
    """Runs a Llama, Qwen2 or Qwen3 `ForCausalLM` module. Has no parameters of its own.

    Not thread-safe. The module may be trained, loaded or moved at any time between calls.

    Attributes:
        blocks: What computes each layer, (x, cos, sin, attention) -> x; a trainer may put a
            function around one, that computes it again when its gradient is due, say.
    """

    can_join = True

    def __init__(self, model: Any) -> None:
        unsupported = reason_unsupported(model)
        if unsupported:
            raise ValueError(f"cannot decode this model: {unsupported}")
        config = model.config
        self.model: nn.Module = model
        self._body = model.model
        self._head = model.get_output_embeddings()
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._depth: int = self._body.layers[0].self_attn.head_dim
        self._epsilon: float = config.rms_norm_eps
        self._has_head_norms = hasattr(self._body.layers[0].self_attn, "q_norm")
        self._rotary: tuple[Tensor, Tensor] | None = None
        self.blocks: list[Callable[..., Tensor]] = [
            functools.partial(self._block, layer, number)
            for number, layer in enumerate(self._body.layers)
        ]

    @property
    def bytes_per_token(self) -> int:
        """Cache memory of one position of one row."""
        size: int = self._head.weight.element_size()
        return 2 * len(self._body.layers) * self._kv_heads * self._depth * size

    def logits(self, batch: PrefixBatch) -> tuple[Tensor, Tensor]:
        """Logits [M, vocabulary] of a batch, and for each response token which row predicts it."""
        return self._logits(self._predicting(batch)), batch.source

    def hidden(self, batch: PrefixBatch) -> tuple[Tensor, Tensor]:
        """Hidden states [M, d] after the last norm, and which predicts each response token."""
        return self._norm(self._body.norm, self._predicting(batch)), batch.source

    def _predicting(self, batch: PrefixBatch) -> Tensor:
        hidden = self._run(batch.tokens, batch.positions, prefix_attention(batch))
        return hidden.index_select(0, batch.outputs)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Any]) -> tuple[Tensor, KvCache]:
        """Read prompts (int arrays). Returns the logits after each, [prompts, V], and the cache."""
        device = self._head.weight.device
        missing = STABLE_ROWS - sum(len(prompt) for prompt in prompts)
        filled = [*prompts, *[prompts[0]] * (-(-missing // len(prompts[0])) if missing > 0 else 0)]
        nothing = prompts[0][:0]
        batch = PrefixBatch.of([(p, nothing.reshape(0, 1), nothing) for p in filled], device)
        blocks: list[tuple[Tensor, Tensor]] = []
        hidden = self._run(batch.tokens, batch.positions, prefix_attention(batch, blocks))
        keys, values = (torch.stack(block) for block in zip(*blocks, strict=True))
        cache = KvCache(keys, values, batch.prompt_lengths)
        ends = batch.outputs
        ends = torch.cat([ends, ends[:1].expand(max(0, STABLE_ROWS - len(ends)))])
        return self._logits(hidden.index_select(0, ends))[: len(prompts)], cache

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: KvCache, going: Tensor | None = None) -> Tensor:
        """Append one token [rows] to each row of the cache; returns the logits after it.

        Rows that are not `going`, bool [rows], stay as they are; their logits mean nothing.
        """
        bias = cache.reserve()

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = cache.write(layer, keys, values)
            return attend(queries[:, None], all_keys, all_values, bias)[:, 0]

        hidden = self._run(tokens, cache.lengths, attention)
        cache.advance(going)
        return self._logits(hidden)

    @torch.no_grad()
    def extend(self, pieces: Sequence[Any], rows: Sequence[int], cache: KvCache) -> Tensor:
        """Append int arrays, of any length from 1 on, to some rows of the cache, each named once.

        Returns the logits after each, [rows, vocabulary].
        """
        device = self._head.weight.device
        # What is written twice is written twice the same.
        missing = STABLE_ROWS - len(pieces)
        filled = [*pieces, *[pieces[0]] * missing]
        which = torch.tensor([*rows, *[rows[0]] * missing], device=device)
        sizes = np.array([len(piece) for piece in filled])
        layout, counts = Slots.of(sizes, device), torch.from_numpy(sizes).to(device)
        width = cache.widen(which, counts)
        steps = torch.arange(layout.width, device=device)
        places = cache.lengths[which][:, None] + steps
        seen = torch.arange(width, device=device) <= places[:, :, None]
        bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf)
        where = layout.gather(which[:, None].expand(-1, layout.width)), layout.gather(places)

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            block = cache.put(layer, where, keys, values)
            own_keys, own_values = (x[which, :, :width] for x in block)
            return layout.gather(attend(layout.spread(queries), own_keys, own_values, bias))

        tokens = torch.from_numpy(np.concatenate(filled).astype(np.int64)).to(device)
        hidden = self._run(tokens, where[1], attention)
        taken = slice(0, len(pieces))
        cache.extended(which[taken], counts[taken])
        ends = counts.cumsum(0) - 1
        return self._logits(hidden.index_select(0, ends))[taken]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = project(self._head, self._norm(self._body.norm, hidden))
        return at_least_float32(logits)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return functional.rms_norm(x, norm.weight.shape, norm.weight, self._epsilon)

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [N, d] of tokens [N] before the last norm."""
        x: Tensor = self._body.embed_tokens(tokens)
        cos, sin = (table.index_select(0, positions)[:, None] for table in self._tables(positions))
        for block in self.blocks:
            x = block(x, cos, sin, attention)
        return x

    def _block(
        self, layer: Any, number: int, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """One layer: hidden states [N, d] in and out."""
        block = layer.self_attn
        y = self._norm(layer.input_layernorm, x)
        queries = project(block.q_proj, y).view(-1, self._heads, self._depth)
        keys = project(block.k_proj, y).view(-1, self._kv_heads, self._depth)
        values = project(block.v_proj, y).view(-1, self._kv_heads, self._depth)
        if self._has_head_norms:
            queries, keys = self._norm(block.q_norm, queries), self._norm(block.k_norm, keys)
        mixed = attention(number, _rotated(queries, cos, sin), _rotated(keys, cos, sin), values)
        x = x + project(block.o_proj, mixed.flatten(1))
        y = self._norm(layer.post_attention_layernorm, x)
        gate, up = project(layer.mlp.gate_proj, y), project(layer.mlp.up_proj, y)
        return x + project(layer.mlp.down_proj, functional.silu(gate) * up)

    # Kept beyond inference mode, for training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, D] from the module's own rotary embedding, kept."""
        weight = self._body.embed_tokens.weight
        needed = int(positions.max()) + 1 if len(positions) else 1
        table = self._rotary
        fits = table is not None and table[0].dtype == weight.dtype
        if table is None or not fits or len(table[0]) < needed or table[0].device != weight.device:
            size = max(2 * needed, 256)
            place = torch.arange(size, device=weight.device)[None]
            cos, sin = self._body.rotary_emb(weight[:1], place)
            table = self._rotary = (cos[0].clone(), sin[0].clone())
        return table


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

"""Low-rank adapters beside megatron's split matrices.

They are peft's in all that can be seen from outside: which modules have them, how they begin, their
names and shapes where the ranks' parts are put together. Megatron keeps several of transformers'
matrices in one; each of them has an adapter of its own all the same. Of the two thin matrices the
one on the side where the large one is cut is cut with it, the other is whole on every rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.workers.engines.lora import Lora
from rlinf.workers.engines.megatron_layout import CUT_INPUTS, JOINED, Shape
from rlinf.workers.engines.megatron_model import core

__all__ = ["add_adapters"]


def add_adapters(module: nn.Module, shape: Shape, lora: Lora, tensor: int) -> None:
    """Put adapters into a rank's part of the model, with values yet to be filled in, and freeze
    everything else.

    `tensor` is the number of ranks that share each matrix.
    """
    module.requires_grad_(False)
    for name, part in list(module.named_modules()):
        kind = name.rpartition(".")[2]
        targets = [t for t in JOINED.get(kind, ()) if t in lora.targets]
        if targets:
            _adapt(part, kind, targets, shape, lora, tensor)


class _Adapter(nn.Module):
    """lora_A [rank, in] and lora_B [out, rank]."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, like: Tensor, *, cut_input: bool
    ) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(like.new_zeros(rank, inputs))
        self.lora_B = nn.Parameter(like.new_zeros(outputs, rank))
        cut: Any = self.lora_A if cut_input else self.lora_B
        cut.tensor_model_parallel = True
        self._cut_input = cut_input

    def forward(self, x: Tensor) -> Tensor:
        mappings = core("tensor_parallel.mappings")
        thin: Tensor = x @ self.lora_A.t()
        if self._cut_input:
            thin = mappings.reduce_from_tensor_model_parallel_region(thin)
        else:
            thin = mappings.copy_to_tensor_model_parallel_region(thin)
        return thin @ self.lora_B.t()


def _adapt(
    part: Any, kind: str, targets: Sequence[str], shape: Shape, lora: Lora, tensor: int
) -> None:
    for target in targets:
        inputs, outputs = shape.sides[target]
        cut_input = target in CUT_INPUTS
        sizes = (inputs // tensor, outputs) if cut_input else (inputs, outputs // tensor)
        part.add_module(target, _Adapter(*sizes, lora.rank, part.weight, cut_input=cut_input))
    scale = lora.alpha / lora.rank

    def add(_: nn.Module, given: tuple[Tensor, ...], found: tuple[Tensor, Any]) -> Any:
        added = {target: getattr(part, target)(given[0]) for target in targets}
        return found[0] + scale * _joined(kind, added, found[0], shape), found[1]

    part.register_forward_hook(add)


def _joined(kind: str, parts: Mapping[str, Tensor], like: Tensor, shape: Shape) -> Tensor:
    """What is added to the outputs of transformers' matrices as megatron has them side by side."""
    if kind == "linear_qkv":
        slots = {"q_proj": shape.heads // shape.key_heads, "k_proj": 1, "v_proj": 1}
        groups = like.shape[-1] // (sum(slots.values()) * shape.depth)
        sizes = {t: (groups, n * shape.depth) for t, n in slots.items()}
    else:
        sizes = {t: (1, like.shape[-1] // len(JOINED[kind])) for t in JOINED[kind]}
    outer = like.shape[:-1]
    blocks = [
        parts[t].view(*outer, *size) if t in parts else like.new_zeros(*outer, *size)
        for t, size in sizes.items()
    ]
    return torch.cat(blocks, -1).view(like.shape)

"""Where the tensors of a megatron-core GPT model lie in a transformers Llama, Qwen2 or Qwen3.

Pure arithmetic: a table of what each tensor is made of, and the cut of each kind. Megatron keeps
queries, keys and values of a key head together, and the two input matrices of the MLP; tensor
parallelism gives each rank whole key heads, and equal parts of the MLP and of the vocabulary, which
is padded for that.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlinf.workers.engines.layout import Piece
from rlinf.workers.errors import ConfigError

__all__ = ["CUT_INPUTS", "JOINED", "Place", "Shape", "padded_vocabulary", "pieces_of", "shape_of"]

KINDS = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
INNER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
ADAPTER = re.compile(r"(\w+)\.(\w+)\.(\w+)\.lora_([AB])")
JOINED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Which of transformers' matrices each of megatron's is made of."""
CUT_INPUTS = ("o_proj", "down_proj")
"""Of these each rank has some columns, of the others some rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that megatron needs to know of a model."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    depth: int
    inner: int
    vocabulary: int
    epsilon: float
    rope_base: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        """Numbers that go into each of transformers' matrices of a layer, and that come out."""
        queries, keys = self.heads * self.depth, self.key_heads * self.depth
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of the model a rank has.

    Attributes:
        tensor: Rank and number of those that share each matrix.
        pipeline: Rank and number of those that share the layers.
        first_copy: It is in the first of the copies that take different samples.
    """

    tensor: tuple[int, int]
    pipeline: tuple[int, int]
    first_copy: bool = True


def shape_of(model: Any, tensor: int, pipeline: int) -> Shape:
    """Of a transformers model. Raises `ConfigError`: megatron cannot have it, or not cut so."""
    kind, config = type(model).__name__, model.config
    if kind not in KINDS:
        raise _refusal(f"{kind} is none of {', '.join(sorted(KINDS))}")
    rope: Any = config.rope_parameters
    bias = bool(getattr(config, "attention_bias", False))
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.hidden_act != "silu":
        raise _refusal(f"its activation is {config.hidden_act}")
    if layer_types != {"full_attention"}:
        raise _refusal(f"its layers are of the kinds {sorted(layer_types)}")
    if rope["rope_type"] != "default":
        raise _refusal(f"its rotary embedding is {rope['rope_type']}")
    if bias or getattr(config, "mlp_bias", False):
        raise _refusal("its projections have biases")
    shape = Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        depth=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=int(model.get_output_embeddings().weight.shape[0]),
        epsilon=config.rms_norm_eps,
        rope_base=float(rope["rope_theta"]),
        qkv_bias=kind == "Qwen2ForCausalLM",
        qk_norm=kind == "Qwen3ForCausalLM",
        tied=bool(config.tie_word_embeddings),
    )
    for size, what, ranks in (
        (shape.layers, "layers", pipeline),
        (shape.key_heads, "key heads", tensor),
        (shape.inner, "numbers inside the MLP", tensor),
    ):
        if size % ranks:
            raise _refusal(f"its {size} {what} cannot be shared equally by {ranks} ranks")
    return shape


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"trainer.engine=megatron cannot train this model: {reason}")


def padded_vocabulary(vocabulary: int, ranks: int) -> int:
    """The next size that so many ranks share equally."""
    return -(-vocabulary // ranks) * ranks


def pieces_of(
    names: Collection[str], shape: Shape, place: Place, adapter_rank: int = 0
) -> list[Piece]:
    """What the tensors of a rank, by megatron's names, are parts of.

    `adapter_rank` is the width of the adapters that are among them, if there are any.
    """
    before = place.pipeline[0] * (shape.layers // place.pipeline[1])
    found: list[Piece] = []
    for name in names:
        inner = INNER.fullmatch(name)
        if inner is None:
            found += _outer(name, shape, place)
            continue
        prefix = f"model.layers.{before + int(inner[1])}"
        if adapter := ADAPTER.fullmatch(inner[2]):
            whole, cut = _adapter(adapter, shape, adapter_rank)
            found.append(cut(name, f"{prefix}.{whole}", shape, place))
            continue
        module, _, kind = inner[2].rpartition(".")
        for target, cut in _inner(module, shape):
            adapted = f"{name.removesuffix(kind)}{target.rpartition('.')[2]}.lora_A" in names
            base = "base_layer." if adapted else ""
            found.append(cut(name, f"{prefix}.{target}.{base}{kind}", shape, place))
    return found


def _adapter(name: re.Match[str], shape: Shape, width: int) -> tuple[str, "Cut"]:
    """peft's name of a thin matrix in a layer, and its cut: that of the large one beside it."""
    block, _, target, which = name.groups()
    inputs, outputs = shape.sides[target]
    cut: Cut
    if target in CUT_INPUTS:
        cut = _columns(width, inputs) if which == "A" else _replicated(outputs, width)
    else:
        cut = _replicated(width, inputs) if which == "A" else _whole_rows(outputs, width)
    parent = "self_attn" if block == "self_attention" else block
    return f"{parent}.{target}.lora_{which}.default.weight", cut


Cut = Callable[[str, str, Shape, Place], Piece]


def _inner(module: str, shape: Shape) -> Iterator[tuple[str, Cut]]:
    """What a module of a layer is made of: transformers' names of it, and the cut of each."""
    plain = {
        "input_layernorm": ("input_layernorm", _replicated(shape.hidden)),
        "pre_mlp_layernorm": ("post_attention_layernorm", _replicated(shape.hidden)),
        "self_attention.q_layernorm": ("self_attn.q_norm", _replicated(shape.depth)),
        "self_attention.k_layernorm": ("self_attn.k_norm", _replicated(shape.depth)),
        "self_attention.linear_proj": (
            "self_attn.o_proj",
            _columns(shape.hidden, shape.heads * shape.depth),
        ),
        "mlp.linear_fc2": ("mlp.down_proj", _columns(shape.hidden, shape.inner)),
    }
    if module in plain:
        yield plain[module]
    elif module == "self_attention.linear_qkv":
        group = shape.heads // shape.key_heads
        for target, slots in (
            ("q_proj", slice(0, group)),
            ("k_proj", slice(group, group + 1)),
            ("v_proj", slice(group + 1, group + 2)),
        ):
            yield f"self_attn.{target}", functools.partial(_heads, slots)
    elif module == "mlp.linear_fc1":
        for number, target in enumerate(("gate_proj", "up_proj")):
            yield f"mlp.{target}", functools.partial(_half, number)
    else:
        raise ValueError(f"megatron has a module {module} that is not known here")


def _outer(name: str, shape: Shape, place: Place) -> list[Piece]:
    if name == "decoder.final_layernorm.weight":
        return [_replicated(shape.hidden)(name, "model.norm.weight", shape, place)]
    target = "model.embed_tokens.weight"
    twin = False
    if name == "output_layer.weight":
        # With one stage a tied output layer has no weight of its own.
        twin = shape.tied
        target = target if shape.tied else "lm_head.weight"
    elif name != "embedding.word_embeddings.weight":
        raise ValueError(f"megatron has a tensor {name} that is not known here")
    rank, count = place.tensor
    share = padded_vocabulary(shape.vocabulary, count) // count
    start = min(rank * share, shape.vocabulary)
    size = min(share, shape.vocabulary - start)
    return [
        Piece(
            name,
            target,
            (shape.vocabulary, shape.hidden),
            (start, 0),
            (size, shape.hidden),
            lambda tensor: tensor[:size],
            place.first_copy and not twin,
        )
    ]


def _replicated(*size: int) -> Cut:
    def cut(name: str, whole: str, _: Shape, place: Place) -> Piece:
        owned = place.first_copy and place.tensor[0] == 0
        return Piece(name, whole, size, (0,) * len(size), size, lambda tensor: tensor, owned)

    return cut


def _whole_rows(rows: int, columns: int) -> Cut:
    def cut(name: str, whole: str, _: Shape, place: Place) -> Piece:
        rank, count = place.tensor
        share = rank, count, lambda tensor: tensor, place.first_copy
        return _rows(name, whole, rows // count, (columns,), share)

    return cut


def _columns(rows: int, columns: int) -> Cut:
    def cut(name: str, whole: str, _: Shape, place: Place) -> Piece:
        rank, count = place.tensor
        share = columns // count
        start, size = (0, rank * share), (rows, share)
        return Piece(
            name, whole, (rows, columns), start, size, lambda tensor: tensor, place.first_copy
        )

    return cut


def _heads(slots: slice, name: str, whole: str, shape: Shape, place: Place) -> Piece:
    """Those of the query, key and value heads of each key head that are in `slots`."""
    rank, count = place.tensor
    groups, slots_in_group = shape.key_heads // count, shape.heads // shape.key_heads + 2
    own = groups * (slots.stop - slots.start) * shape.depth
    rest = () if whole.endswith("bias") else (shape.hidden,)

    def take(tensor: Tensor) -> Tensor:
        return tensor.view(groups, slots_in_group, shape.depth, *rest)[:, slots]

    return _rows(name, whole, own, rest, (rank, count, take, place.first_copy))


def _half(number: int, name: str, whole: str, shape: Shape, place: Place) -> Piece:
    """The first or the second of two matrices that lie one after the other."""
    rank, count = place.tensor
    own = shape.inner // count

    def take(tensor: Tensor) -> Tensor:
        return tensor.view(2, own, shape.hidden)[number]

    return _rows(name, whole, own, (shape.hidden,), (rank, count, take, place.first_copy))


def _rows(
    name: str,
    whole: str,
    own: int,
    rest: Sequence[int],
    place: tuple[int, int, Callable[[Tensor], Tensor], bool],
) -> Piece:
    rank, count, take, owned = place
    return Piece(
        name,
        whole,
        (own * count, *rest),
        (rank * own, *(0 for _ in rest)),
        (own, *rest),
        take,
        owned,
    )

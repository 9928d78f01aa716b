"""Making a megatron-core GPT model, on GPUs as it is meant to be, and on the CPU over gloo.

Attention and rotary angles, by megatron's public extension points, are those of packed sequences.
What megatron asks of CUDA while it runs (the current device for buffers of its pipeline) is
answered by `on_this_machine`.
"""

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlinf.workers.engines.megatron_layout import Shape, padded_vocabulary
from rlinf.workers.engines.prefix_attention import Attention
from rlinf.workers.errors import ConfigError

__all__ = ["Packing", "build", "core", "on_this_machine"]

HINT = "pip install 'rlinf-workers[megatron]'"


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Sequences that lie one after the other in a row of N tokens.

    In the place of megatron's own `PackedSeqParams`, which knows no shared prompts; megatron passes
    it on to its rotary embedding and its attention.

    Attributes:
        positions: int64 [N], the place of each token in its own sequence.
        attention: Who sees whom.
    """

    positions: Tensor
    attention: Attention
    qkv_format: None = None
    cp_group: None = None


def core(name: str) -> Any:
    """A module of megatron.core, imported without what it says about others not being there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(f"megatron.core.{name}")
        except ImportError as error:
            raise ConfigError(f"trainer.engine=megatron needs megatron-core: {HINT}") from error


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    """Where there is no GPU, let those who ask torch for the current one have the CPU.

    Of the whole process, so only while megatron runs: a trainer's worker does nothing beside it.
    """
    if torch.cuda.is_available():
        yield
        return
    asked, waited = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    try:
        with _Cpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = asked, waited


class _Cpu(TorchFunctionMode):
    """New tensors that are to be on a GPU are on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


def build(shape: Shape, dtypes: tuple[torch.dtype, torch.dtype], tensor: int, pipeline: int) -> Any:
    """This rank's part of a GPT model of that shape; its weights are random.

    `dtypes` are that of the parameters and that of what goes from stage to stage. megatron's
    parallel state must be there. The model is on the CPU.
    """
    state = core("parallel_state")
    config = _config(shape, dtypes, tensor, pipeline)
    specs = core("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    spec.submodules.self_attention.submodules.core_attention = _attention_class()
    model = core("models.gpt").GPTModel(
        config,
        spec,
        vocab_size=padded_vocabulary(shape.vocabulary, tensor),
        max_sequence_length=1 << 20,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        share_embeddings_and_output_weights=shape.tied,
    )
    model.rotary_pos_emb = _rotary_class()(
        shape.depth, rotary_percent=1.0, rotary_base=shape.rope_base, use_cpu_initialization=True
    )
    return model


def _config(
    shape: Shape, dtypes: tuple[torch.dtype, torch.dtype], tensor: int, pipeline: int
) -> Any:
    return core("transformer").TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_heads,
        kv_channels=shape.depth,
        ffn_hidden_size=shape.inner,
        layernorm_epsilon=shape.epsilon,
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        params_dtype=dtypes[0],
        pipeline_dtype=dtypes[1],
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # the default one refuses variable lengths, unused
        # Losses are sums; nobody is to divide them.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


def _attention_class() -> type:
    base: Any = core("transformer.module").MegatronModule

    class PackedAttention(base):  # type: ignore[misc]
        """What the `Packing` says, of queries [N, 1, H, D], keys and values [N, 1, Hk, D]."""

        def __init__(self, config: Any, *_: object, **__: object) -> None:
            super().__init__(config=config)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *_: object,
            packed_seq_params: Packing,
            **__: object,
        ) -> Tensor:
            """[N, 1, H D]."""
            mixed = packed_seq_params.attention(0, query[:, 0], key[:, 0], value[:, 0])
            return mixed.flatten(1)[:, None]

    return PackedAttention


def _rotary_class() -> type:
    base: Any = core("models.common.embeddings.rotary_pos_embedding").RotaryEmbedding

    class PackedRotary(base):  # type: ignore[misc]
        """Megatron's angles at the positions of a `Packing`, on the device where they are."""

        def get_rotary_seq_len(self, *given: Any) -> Tensor:
            """What megatron hands on to `forward`, as a rule a length."""
            packing: Packing = given[-1]
            return packing.positions

        def forward(self, positions: Tensor, **_: object) -> Tensor:
            """Angles [N, 1, 1, D] at positions [N]."""
            angles = torch.outer(positions.to(self.inv_freq), self.inv_freq.to(positions.device))
            return torch.cat((angles, angles), -1)[:, None, None]

    return PackedRotary

"""Making a megatron-core GPT model, on GPUs as it is meant to be, and on the CPU over gloo.

On the CPU only public extension points are used for the model: attention by torch's own kernel, and
a rotary embedding that stays there. What megatron asks of CUDA while it runs (the current device
for buffers of its pipeline) is answered by `on_this_machine`.
"""

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlinf.workers.engines.megatron_layout import Shape, padded_vocabulary
from rlinf.workers.errors import ConfigError

__all__ = ["build", "core", "on_this_machine"]

HINT = "pip install 'rlinf-workers[megatron]'"


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


def build(shape: Shape, dtype: torch.dtype, tensor: int, pipeline: int) -> Any:
    """This rank's part of a GPT model of that shape; its weights are random.

    megatron's parallel state must be there. The model is on the CPU.
    """
    state = core("parallel_state")
    config = _config(shape, dtype, tensor, pipeline)
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


def _config(shape: Shape, dtype: torch.dtype, tensor: int, pipeline: int) -> Any:
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
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

    class CausalAttention(base):  # type: ignore[misc]
        """Causal attention by torch: queries [s, b, H, D], keys and values [s, b, Hk, D]."""

        def __init__(
            self, config: Any, *_: object, softmax_scale: Any = None, **__: object
        ) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
        ) -> Tensor:
            """[s, b, H D]. Rows are padded at their end, so that causality is the only mask."""
            queries, keys, values = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            mixed = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                scale=self.scale,
                enable_gqa=query.size(2) != key.size(2),
            )
            return mixed.permute(2, 0, 1, 3).flatten(2)

    return CausalAttention


def _rotary_class() -> type:
    base: Any = core("models.common.embeddings.rotary_pos_embedding").RotaryEmbedding

    class Rotary(base):  # type: ignore[misc]
        """Megatron's, on the device where its frequencies are."""

        def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
            """Angles [positions, 1, 1, D]."""
            angles = self.get_freqs_non_repeated(max_seq_len, offset)
            return torch.cat((angles, angles), -1)[:, None, None]

    return Rotary

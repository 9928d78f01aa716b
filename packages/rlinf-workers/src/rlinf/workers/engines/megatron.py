"""`trainer.engine=megatron`: matrices and layers are split among ranks, by megatron-core.

`trainer.parallel` says how; ranks beyond tensor times pipeline are further copies of the model,
which take different samples. Weights come in from a transformers model and go out under its names.
Ranks that share a model run the same micro-batches, packed as `PrefixBatch` says.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf.workers.algorithms.masking import at_least_float32
from rlinf.workers.engines.layout import Piece, fill
from rlinf.workers.engines.lora import adapt
from rlinf.workers.engines.megatron_layout import Place, pieces_of, shape_of
from rlinf.workers.engines.megatron_lora import add_adapters
from rlinf.workers.engines.megatron_model import Packing, build, core, on_this_machine
from rlinf.workers.engines.models import in_bfloat16, takes_bfloat16
from rlinf.workers.engines.parameters import move, nbytes, state_of
from rlinf.workers.engines.prefix_attention import prefix_attention
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.sampling import adjusted
from rlinf.workers.engines.sharded_trainer import Micro, ShardedTrainer
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.engines.vocabulary import split_logprobs
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.rollout import Sampling
from rlinf.workers.team import Team

__all__ = ["MegatronModel", "make"]

SHARED_NORMS = ("q_layernorm", "k_layernorm")
"""Every rank has them, and uses them for its own heads only."""


def make(model: nn.Module, config: TrainerConfig, team: Team) -> ShardedTrainer:
    """This rank's trainer of `model`, a transformers one with the same weights on every rank.

    Raises `ConfigError`: megatron cannot train this model, or not in this way.
    """
    return ShardedTrainer(MegatronModel(model, config, team), config, team)


class MegatronModel:
    """A `ShardedModel` of megatron-core."""

    def __init__(self, model: nn.Module, config: TrainerConfig, team: Team) -> None:
        tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
        if team.size % (tensor * pipeline):
            raise ConfigError(
                f"trainer.ranks={team.size} is no multiple of the {tensor} x {pipeline} ranks of "
                "trainer.parallel"
            )
        team.connect()
        self._shape = shape_of(model, tensor, pipeline)
        self._state = state = _parallel_state(tensor, pipeline)
        self._config = config
        source = next(model.parameters())
        self._device = source.device
        if config.lora is not None:
            adapt(model, config.lora)
        mixed = takes_bfloat16(config.autocast, self._device)
        between = torch.bfloat16 if mixed else source.dtype
        with on_this_machine():
            self._module = build(self._shape, (source.dtype, between), tensor, pipeline).to(source)
        self._module.eval()
        place = Place(
            (state.get_tensor_model_parallel_rank(), tensor),
            (state.get_pipeline_model_parallel_rank(), pipeline),
            state.get_data_parallel_rank() == 0,
        )
        self._place = place
        self._select(config)
        self.data = (state.get_data_parallel_rank(), state.get_data_parallel_world_size())
        self.reports = place.pipeline[0] == pipeline - 1 and place.tensor[0] == 0
        self.vocabulary = self._shape.vocabulary
        named = dict(self._module.named_parameters())
        self.trainable: Mapping[str, nn.Parameter] = {
            n: p for n, p in named.items() if p.requires_grad
        }
        rank = config.lora.rank if config.lora else 0
        self.pieces: Sequence[Piece] = pieces_of(named, self._shape, place, rank)
        with torch.no_grad():
            for name in named.keys() & {"embedding.word_embeddings.weight", "output_layer.weight"}:
                named[name].zero_()  # what pads the vocabulary stays so
        fill(self.pieces, self.tensors(), state_of(model))
        self._outputs: Tensor | None = None
        if self._module.post_process:
            self._module.output_layer.register_forward_pre_hook(self._predicting)
        if config.activation_checkpointing:
            _recompute(self._module)

    def tensors(self) -> Mapping[str, Tensor]:
        """See `ShardedModel`."""
        return dict(self._module.named_parameters())

    def run(self, micros: Sequence[Micro]) -> None:
        """See `ShardedModel`."""
        if micros:
            # The backward pass too: what megatron's products have saved is in mixed precision.
            with on_this_machine(), in_bfloat16(self._config.autocast, self._device):
                schedules = core("pipeline_parallel")
                schedules.get_forward_backward_func()(
                    forward_step_func=self._step,
                    data_iterator=iter(micros),
                    model=[self._module],
                    num_microbatches=len(micros),
                    seq_length=1,
                    micro_batch_size=1,
                    forward_only=False,
                )
        self._sum_gradients()

    def norm(self) -> Tensor:
        """See `ShardedModel`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, parameter in self.trainable.items():
            if parameter.grad is not None and self._counts(name, parameter):
                total += parameter.grad.double().square().sum()
        dist.all_reduce(total, group=self._state.get_model_parallel_group())
        return total.sqrt().to(next(self._module.parameters()).dtype)

    def move(self, tensors: Sequence[Tensor], *, away: bool) -> None:
        """See `ShardedModel`."""
        every = [*self._module.parameters(), *tensors]
        move(every, torch.device("cpu") if away else self._device)

    def resident_bytes(self, tensors: Sequence[Tensor]) -> int:
        """See `ShardedModel`."""
        return nbytes([*self._module.parameters(), *tensors], self._device)

    def _select(self, config: TrainerConfig) -> None:
        """Freeze what is not to learn."""
        tensor, last = self._place.tensor[1], config.trainable_layers
        if config.lora is not None:
            add_adapters(self._module, self._shape, config.lora, tensor)
        elif last:
            if last > self._shape.layers:
                raise ConfigError(
                    f"trainable_layers={last}, but the model has {self._shape.layers} layers"
                )
            self._module.requires_grad_(False)
            for layer in self._module.decoder.layers:
                # Megatron counts from 1, over all stages.
                layer.requires_grad_(layer.layer_number > self._shape.layers - last)
        first = self._module.pre_process
        if first and not self._module.embedding.word_embeddings.weight.requires_grad:
            # The next stage has a gradient for what it is given, whether anything here learns or
            # not.
            self._module.embedding.register_forward_hook(lambda *given: given[2].requires_grad_())

    def _predicting(self, _: object, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Logits are wanted of some tokens only."""
        assert self._outputs is not None
        return given[0].index_select(0, self._outputs), *given[1:]

    def _step(self, micros: Iterator[Micro], module: Any) -> tuple[Tensor, Any]:
        """A micro-batch through this rank's layers, and what makes a loss of it in the last one."""
        micro = next(micros)
        batch = PrefixBatch.of(micro.rows, self._device)
        self._outputs = batch.outputs
        packing = Packing(batch.positions, prefix_attention(batch))
        tokens, places = batch.tokens[None], batch.positions[None]
        output: Tensor = module(tokens, places, None, packed_seq_params=packing)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs = self._logprobs(logits[0], batch, micro.sampling)
            return micro.loss(batch, logprobs), torch.ones((), dtype=torch.int), {}

        return output, loss

    def _logprobs(self, logits: Tensor, batch: PrefixBatch, sampling: Sampling) -> Tensor:
        """Log-probs [R] under this rank's columns [M, V / tensor] of the logits."""
        rank, width = self._place.tensor[0], logits.shape[1]
        first, end = rank * width, (rank + 1) * width
        banned = {*sampling.banned_ids, *range(self.vocabulary, end)}
        own = Sampling(
            temperature=sampling.temperature,
            banned_ids=tuple(sorted(i - first for i in banned if first <= i < end)),
        )
        group = self._state.get_tensor_model_parallel_group()
        found = adjusted(at_least_float32(logits), own).index_select(0, batch.source)
        return split_logprobs(found, batch.targets, first, group)

    def _counts(self, name: str, parameter: Tensor) -> bool:
        """Whether this rank is the one to count a parameter, of those that have the same."""
        if name == "output_layer.weight" and self._shape.tied:
            return False
        return self._place.tensor[0] == 0 or getattr(parameter, "tensor_model_parallel", False)

    def _sum_gradients(self) -> None:
        """Over the ranks that have the same parameter and have seen different things."""
        pipeline, tensor = self._place.pipeline[1], self._place.tensor[1]
        for name, parameter in self.trainable.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.data[1] > 1:
                dist.all_reduce(parameter.grad, group=self._state.get_data_parallel_group())
            if tensor > 1 and any(norm in name for norm in SHARED_NORMS):
                group = self._state.get_tensor_model_parallel_group()
                dist.all_reduce(parameter.grad, group=group)
        ends = (0, pipeline - 1)
        if pipeline > 1 and self._shape.tied and self._place.pipeline[0] in ends:
            weight = self._module.shared_embedding_or_output_weight()
            if weight.requires_grad:
                dist.all_reduce(weight.grad, group=self._state.get_embedding_group())


def _parallel_state(tensor: int, pipeline: int) -> Any:
    state = core("parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    with on_this_machine():
        state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
        )
    return state


def _recompute(module: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    for layer in module.decoder.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

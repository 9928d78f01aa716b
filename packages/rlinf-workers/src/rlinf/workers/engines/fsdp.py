"""`trainer.engine=fsdp`: every rank holds a slice of each parameter, of its gradient and moments.

torch's fully_shard (FSDP2): a layer's parameters are brought together just before it is computed,
and its gradients are summed into slices right after. On the CPU ranks talk by gloo, on GPUs by
nccl. Ranks take different samples; the number of forward passes must be the same on all of them, so
one that has fewer joins in with a blank one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.engines.backbone import TransformersBackbone, backbone_of
from rlinf.workers.engines.layers import layers_of, recompute_layers, select_trainable
from rlinf.workers.engines.layout import Piece
from rlinf.workers.engines.lora import adapt
from rlinf.workers.engines.models import in_bfloat16
from rlinf.workers.engines.parameters import nbytes
from rlinf.workers.engines.prefix_batch import PrefixBatch, Rows
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.engines.sharded_trainer import Micro, ShardedTrainer
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.roles.rollout import Sampling
from rlinf.workers.team import Team

__all__ = ["FsdpModel", "make"]

BLANK: Rows = (np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.ones(1, np.int32))


def make(model: nn.Module, config: TrainerConfig, team: Team) -> ShardedTrainer:
    """This rank's trainer of `model`, which has the same weights on every rank."""
    return ShardedTrainer(FsdpModel(model, config, team), config, team)


class FsdpModel:
    """A `ShardedModel` whose parameters are cut along their first dimension."""

    reports = True

    def __init__(self, model: nn.Module, config: TrainerConfig, team: Team) -> None:
        self._team, self._config = team, config
        team.connect()
        self._device = next(model.parameters()).device
        self.data = (team.rank, team.size)
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        if config.lora is not None:
            adapt(model, config.lora)
        backbone = backbone_of(model)
        if config.activation_checkpointing:
            recompute_layers(model, backbone)
        select_trainable(model, config.trainable_layers)
        self._logits = _shard(model, backbone, team.size)
        self._module = model
        self.trainable: Mapping[str, nn.Parameter] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        self.pieces: Sequence[Piece] = [_piece(name, p) for name, p in model.named_parameters()]

    def tensors(self) -> Mapping[str, Tensor]:
        """See `ShardedModel`: slices, as DTensors."""
        return dict(self._module.named_parameters())

    def run(self, micros: Sequence[Micro]) -> None:
        """See `ShardedModel`."""
        most = max(self._team.gather(len(micros)))
        for micro in micros:
            batch = PrefixBatch.of(micro.rows, self._device)
            loss = micro.loss(batch, self._logprobs(batch, micro.sampling))
            loss.backward()  # type: ignore[no-untyped-call]
        blank = PrefixBatch.of([BLANK], self._device)
        for _ in range(most - len(micros)):
            nothing = self._logprobs(blank, Sampling()).sum() * 0
            nothing.backward()  # type: ignore[no-untyped-call]

    def norm(self) -> Tensor:
        """See `ShardedModel`."""
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def move(self, tensors: Sequence[Tensor], *, away: bool) -> None:
        """See `ShardedModel`."""
        device = torch.device("cpu") if away else self._device
        self._module.to(device)
        for tensor in map(_held, tensors):
            tensor.data = tensor.data.to(device)

    def resident_bytes(self, tensors: Sequence[Tensor]) -> int:
        """See `ShardedModel`."""
        every = [*self._module.parameters(), *tensors]
        return nbytes(map(_held, every), self._device)

    def _logprobs(self, batch: PrefixBatch, sampling: Sampling) -> Tensor:
        with in_bfloat16(self._config.autocast, self._device):
            logits, source = self._logits(batch)
        return token_logprobs(logits, source, batch.targets, sampling)


def _shard(model: Any, backbone: Any, size: int) -> Any:
    """Split `model` in place, a layer at a time; returns the backbone's `logits` over it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (size,))
    own_forward = isinstance(backbone, TransformersBackbone)
    for number, layer in enumerate(layers_of(model)):
        fully_shard(layer, mesh=mesh)
        if not own_forward:
            layer.run_block = backbone.blocks[number]
            register_fsdp_forward_method(layer, "run_block")
            backbone.blocks[number] = layer.run_block
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means; gloo knows no other.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if own_forward:
        return backbone.logits
    model.run_logits = backbone.logits
    register_fsdp_forward_method(model, "run_logits")
    return model.run_logits


def _piece(name: str, parameter: Any) -> Piece:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(parameter.shape)
    size, start = compute_local_shape_and_global_offset(
        shape, parameter.device_mesh, parameter.placements
    )
    return Piece(name, name, shape, tuple(start), tuple(size), _local)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _held(tensor: Any) -> Tensor:
    """The very tensor that a DTensor is made of; `to_local` gives a view of it."""
    held: Tensor = getattr(tensor, "_local_tensor", tensor)
    return held

"""Layers of a causal LM: which of them learn, which are computed again, and a head of its own."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf.workers.engines.backbone import Backbone, TransformersBackbone
from rlinf.workers.errors import ConfigError

__all__ = ["head_of_zeros", "layers_of", "recompute_layers", "select_trainable"]


def head_of_zeros(inputs: int, like: Tensor) -> nn.Linear:
    """A layer from hidden states to one number, which is 0 at first; of the dtype of `like`.

    It draws from no random generator: another thread may be drawing.
    """
    kind = {"device": like.device, "dtype": like.dtype}
    head: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, 1, **kind)  # type: ignore[no-untyped-call]
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def layers_of(model: nn.Module) -> list[Any]:
    """The layers of the longest stack in the model; none where it has no stack."""
    stacks = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(stacks, key=len, default=[])


def select_trainable(model: nn.Module, last_layers: int) -> dict[str, nn.Parameter]:
    """Freeze all but the last layers (0: freeze nothing more); the parameters left, by name."""
    if last_layers:
        layers = layers_of(model)
        if len(layers) < last_layers:
            raise ConfigError(
                f"trainable_layers={last_layers}, but the model has {len(layers)} layers"
            )
        model.requires_grad_(False)
        for layer in layers[len(layers) - last_layers :]:
            layer.requires_grad_(True)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def recompute_layers(model: nn.Module, backbone: Backbone) -> None:
    """Keep only what goes into each layer; compute the rest again when its gradient is due.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. To be
    called before the model is split among ranks.
    """
    again = functools.partial(checkpoint, use_reentrant=False)
    if isinstance(backbone, TransformersBackbone):
        for layer in layers_of(model):
            layer.forward = functools.partial(again, layer.forward)
    else:
        blocks: Any = backbone
        blocks.blocks = [functools.partial(again, block) for block in blocks.blocks]

"""Low-rank adapters: train two thin matrices beside each large one, which stays as it is.

Hu et al. 2021, "LoRA", arXiv:2106.09685; the layers are those of peft. What is published has the
adapters added in, so a rollout needs to know nothing of them.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.workers.engines.trainer_config import Lora
from rlinf.workers.errors import ConfigError
from rlinf.workers.random_state import seeded

__all__ = ["Lora", "adapt", "merged"]

BASE = ".base_layer."
HINT = "pip install 'rlinf-workers[lora]'"


def adapt(model: nn.Module, lora: Lora, seed: int = 0) -> None:
    """Put adapters into `model`, which computes the same as before, and freeze everything else.

    With the same seed they begin the same everywhere. Raises `ConfigError`: peft is not installed,
    or there is no such module.
    """
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"trainer.lora needs peft: {HINT}") from error
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0
    )
    with seeded(seed):
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ConfigError(f"trainer.lora.targets: {error}") from error
    model.eval()


def merged(state: Mapping[str, Tensor], lora: Lora | None) -> dict[str, Tensor]:
    """Parameters of an adapted model as those of one without adapters, under its names.

    Those that have an adapter are new tensors, computed in float32 at least; the others are passed
    on. With `lora` None all are.
    """
    if lora is None:
        return dict(state)
    found = {}
    for name, value in state.items():
        if ".lora_" in name:
            continue
        plain = name.replace(BASE, ".")
        prefix = name.removesuffix(".base_layer.weight")
        if plain != name and prefix != name:
            a, b = (state[f"{prefix}.lora_{part}.default.weight"] for part in "AB")
            exact = torch.promote_types(value.dtype, torch.float32)
            product = b.to(exact) @ a.to(exact) * (lora.alpha / lora.rank)
            value = (value.to(exact) + product).to(value.dtype)
        found[plain] = value
    return found

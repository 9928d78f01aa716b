"""Engines by the name that a configuration gives: ours, and those of other distributions.

A plug-in is an entry point of the group `rlinf.engines`, named `<role>.<engine>` ("trainer.mine"),
that loads what `TRAINERS` or `ROLLOUTS` says of the engines of this role.
"""

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from rlinf.workers.errors import ConfigError

__all__ = ["GROUP", "ROLLOUTS", "TRAINERS", "engine_maker"]

GROUP = "rlinf.engines"
TRAINERS: Mapping[str, str] = {
    "torch": "rlinf.workers.engines.torch_trainer:make",
    "fsdp": "rlinf.workers.engines.fsdp:make",
    "megatron": "rlinf.workers.engines.megatron:make",
}
"""Name -> make(model, config, team): a `TrainerEngine` of this rank, with `save` and `restore`."""

ROLLOUTS: Mapping[str, str] = {
    "torch": "rlinf.workers.engines.torch_generate:make",
    "sglang": "rlinf.workers.engines.sglang.engine:make",
}
"""Name -> make(model, config): a `RolloutEngine` that is a `WeightTarget` too."""


def engine_maker(role: str, name: str, own: Mapping[str, str]) -> Callable[..., Any]:
    """What makes the engine `name` of a role. Raises `ConfigError`: there is none, or it fails."""
    if name in own:
        module, _, attribute = own[name].partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return found
    plugins = {e.name: e for e in entry_points(group=GROUP) if e.name.startswith(f"{role}.")}
    if f"{role}.{name}" not in plugins:
        known = [*own, *(plugin.removeprefix(f"{role}.") for plugin in sorted(plugins))]
        raise ConfigError(f"{role}.engine={name} is not known: choose one of {', '.join(known)}")
    try:
        loaded: Callable[..., Any] = plugins[f"{role}.{name}"].load()
    except ImportError as error:
        raise ConfigError(f"{role}.engine={name} cannot be loaded: {error}") from error
    return loaded

"""Environments by name: entry points of the group `rlinf.environments`, loaded on first use.

An entry point is a function `make(id, **options) -> Environment`. Instead of a name there may be
`package.module:function`, which needs no installation. Where many environments can be simulated
together there is a second function beside it, `make_batch(id, count, **options)`: the name of the
first one with `_batch`. It is asked first, and answers None where that is not possible here.
"""

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import Environment, EnvironmentBatch

__all__ = ["EnvironmentSpec", "RenderingUnavailable", "make_batch", "make_environment"]

GROUP = "rlinf.environments"


class RenderingUnavailable(ConfigError):
    """This environment cannot draw a picture here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Which environment, as plain data that travels to where it is made.

    Attributes:
        kind: An installed plug-in (gymnasium, maniskill, libero), or `package.module:function`.
        id: Which of its environments.
        options: For its maker.
        variables: Environment variables of the processes it runs in, such as MUJOCO_GL: osmesa.
    """

    kind: str = "gymnasium"
    id: str = "InvertedPendulum-v5"
    options: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Names it in messages."""
        return f"{self.kind}:{self.id}"


def make_environment(spec: EnvironmentSpec) -> Environment:
    """Make one. Raises `ConfigError`: the kind is not known, or its package is not installed."""
    return _maker(spec.kind)(spec.id, **spec.options)


def make_batch(spec: EnvironmentSpec, count: int) -> EnvironmentBatch | None:
    """Make so many that are simulated together; None: this kind cannot, here. Raises as above."""
    maker = _maker(spec.kind)
    beside = vars(sys.modules[maker.__module__]).get(f"{maker.__name__}_batch")
    made: EnvironmentBatch | None = beside(spec.id, count, **spec.options) if beside else None
    return made


@functools.cache
def _maker(kind: str) -> Callable[..., Environment]:
    module, colon, name = kind.partition(":")
    if colon:
        made: Callable[..., Environment] = getattr(importlib.import_module(module), name)
        return made
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if kind not in points:
        known = ", ".join(sorted(points)) or "none"
        raise ConfigError(
            f"environment kind {kind!r} is not installed; there are: {known}. A plug-in names "
            f"itself as an entry point of the group {GROUP}"
        )
    loaded: Callable[..., Environment] = points[kind].load()
    return loaded

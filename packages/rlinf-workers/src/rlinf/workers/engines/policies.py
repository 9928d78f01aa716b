"""Policies by name, made for what an environment shows and takes."""

import threading
from dataclasses import dataclass, field
from typing import Literal

from rlinf.workers.bounds import Count, Natural, Positive
from rlinf.workers.engines.mlp_actor import MlpSizes
from rlinf.workers.engines.mlp_policy import MlpPolicy, MlpStart
from rlinf.workers.engines.vla_policy import VlaPolicy, VlaSizes
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.policy import Policy
from rlinf.workers.roles.simulator import Spaces

__all__ = ["PolicySpec", "build_policy"]

_BUILDING = threading.Lock()
"""The global random state cannot be shared by threads, and workers may be threads."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Which policy, as plain data that travels to a worker.

    Attributes:
        name: `mlp`: two tanh networks over a state vector. `vla`: a transformer over pictures, an
            instruction and a state, which answers with chunks of action tokens.
        hidden: Widths of the hidden layers.
        bins: Of mlp. 0: a Gaussian action; else each number of an action is one of so many tokens.
        std: Standard deviation of the Gaussian at first.
        seed: Of the random weights.
        vla: Sizes of vla.
    """

    name: Literal["mlp", "vla"] = "mlp"
    hidden: tuple[Count, ...] = (64, 64)
    bins: Natural = 0
    std: Positive = 1.0
    seed: Natural = 0
    vla: VlaSizes = field(default_factory=VlaSizes)


def build_policy(spec: PolicySpec, spaces: Spaces) -> Policy:
    """The policy on the CPU; the same seed gives the same weights.

    Raises `ConfigError`: it cannot take what the environment shows.
    """
    with _BUILDING:
        return _built(spec, spaces)


def _built(spec: PolicySpec, spaces: Spaces) -> Policy:
    if spec.name == "vla":
        return VlaPolicy(spec.vla, spaces, spec.seed)
    shown = spaces.observation.get("state")
    if shown is None or len(shown.shape) != 1:
        names = ", ".join(spaces.observation)
        raise ConfigError(f"policy.name=mlp needs a state vector; this environment shows {names}")
    sizes = MlpSizes(shown.shape[0], spaces.low, spaces.high, spec.hidden, spec.bins)
    return MlpPolicy(sizes, MlpStart(spec.seed, spec.std))

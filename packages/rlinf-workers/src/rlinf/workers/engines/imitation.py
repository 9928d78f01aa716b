"""Behaviour cloning: a policy of action tokens imitates demonstrations before it learns by itself.

Reinforcement learning of rare successes has nothing to begin with; a policy that was shown some
succeeds now and then.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.bounds import Count, Natural, NonNegative, Positive
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.simulation.lane import demonstrate
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.policy import Evaluation
from rlinf.workers.roles.simulator import Demonstration, FloatArray

__all__ = ["Imitates", "ImitationConfig", "collect_demonstrations", "imitate"]


@dataclass(frozen=True, slots=True)
class ImitationConfig:
    """How a policy is warmed up.

    Attributes:
        episodes: Demonstrations, with the seeds 0, 1, ...; 0: none.
        noise: Standard deviation of what is added to the motions that are carried out, so that
            there is something to correct; what is recorded is what the script wanted.
        steps: Of a demonstration, at most.
        processes: That make them side by side.
        timeout_s: For one.
        updates: Optimiser steps.
        batch: Decisions of each.
        optimiser: AdamW's settings.
        sharpen: By what the logits are multiplied in the end. Neighbouring tokens stay about as
            likely as the right one, and the many tokens of a decision are drawn independently:
            drawn as they were learnt, hardly a decision has none that is off.
    """

    episodes: Natural = 0
    noise: NonNegative = 0.1
    steps: Count = 300
    processes: Count = 2
    timeout_s: Positive = 600.0
    updates: Count = 400
    batch: Count = 64
    optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(lr=1e-3, warmup_steps=20, beta2=0.99)
    )
    sharpen: Positive = 1.0


class Imitates(Protocol):
    """A policy that can be warmed up."""

    def fit(self, observations: Mapping[str, Tensor]) -> None:
        """Bring what is shown to a scale of one, as it is in these observations."""

    def tokens(self, actions: Tensor) -> Tensor:
        """The choices that mean actions [B, C, A] most nearly."""

    def evaluate(self, observations: Mapping[str, Tensor], choices: Tensor) -> Evaluation:
        """See `Policy`."""

    def sharpen(self, factor: float) -> None:
        """Multiply all logits from now on: the likeliest choices become more so."""


def collect_demonstrations(spec: EnvironmentSpec, config: ImitationConfig) -> list[Demonstration]:
    """Those that were successful, in the order of their seeds.

    Raises:
        ConfigError: None was.
        EnvironmentLost: The environment has no script, or a process ended or took too long.
    """
    shares = [
        range(first, config.episodes, config.processes)
        for first in range(min(config.processes, config.episodes))
    ]

    def some(seeds: range) -> list[Demonstration]:
        patience_s = config.timeout_s * len(seeds)
        return demonstrate(spec, seeds, config.steps, config.noise, patience_s)

    with ThreadPoolExecutor(config.processes) as threads:
        parts = list(threads.map(some, shares))
    made = [one for turn in itertools.zip_longest(*parts) for one in turn if one is not None]
    kept = [shown for shown in made if shown.success]
    if not kept:
        raise ConfigError(f"none of {len(made)} demonstrations in {spec.label} was successful")
    return kept


def imitate(
    policy: Imitates, shown: Sequence[Demonstration], chunk: int, config: ImitationConfig, seed: int
) -> float:
    """Make the demonstrated actions likely; the mean log-prob of a token in the last updates."""
    assert isinstance(policy, nn.Module)
    observations = {
        name: torch.from_numpy(np.concatenate([one.observations[name] for one in shown]))
        for name in shown[0].observations
    }
    actions = torch.from_numpy(np.concatenate([_chunks(one.actions, chunk) for one in shown]))
    policy.fit(observations)
    tokens = policy.tokens(actions)
    optimiser = Optimiser([p for p in policy.parameters() if p.requires_grad], config.optimiser)
    generator = torch.Generator().manual_seed(seed)
    last = 0.0
    for _ in range(config.updates):
        rows = torch.randint(len(tokens), (config.batch,), generator=generator)
        seen = {name: tensor[rows] for name, tensor in observations.items()}
        found = policy.evaluate(seen, tokens[rows])
        mean = found.logprobs.mean() / tokens[0].numel()
        (-mean).backward()  # type: ignore[no-untyped-call]
        optimiser.step(1.0)
        last = float(mean.detach()) if not last else 0.95 * last + 0.05 * float(mean.detach())
    if not math.isfinite(last):
        raise ConfigError("imitation diverged: lower imitation.optimiser.lr")
    policy.sharpen(config.sharpen)
    return last


def _chunks(actions: FloatArray, chunk: int) -> FloatArray:
    """The actions of each step and the next ones, [N, chunk, A]; the last one is repeated."""
    rows = np.minimum(np.arange(len(actions))[:, None] + np.arange(chunk), len(actions) - 1)
    found: FloatArray = actions[rows]
    return found

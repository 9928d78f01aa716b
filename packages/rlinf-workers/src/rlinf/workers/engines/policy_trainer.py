"""The trainer of policies that act: PPO or GRPO over trajectories.

Source: PPO, Schulman et al. 2017, arXiv:1707.06347, in the form that Andrychowicz et al. 2020,
arXiv:2006.05990, found to work: several passes over shuffled minibatches, advantages normalised
within each.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.losses import Clip, PolicyLoss, ppo_clip, value_loss
from rlinf.workers.bounds import Count, NonNegative, Positive, Share
from rlinf.workers.engines.buckets import Buckets
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.parameters import load_state, move, nbytes, state_of
from rlinf.workers.engines.trajectory_batch import (
    Flat,
    episode_advantages,
    flat,
    grid,
    stream_advantages,
)
from rlinf.workers.roles.policy import Policy
from rlinf.workers.roles.simulator import Trajectory

__all__ = ["PolicyStats", "PolicyTrainer", "PolicyTrainerConfig"]

WINDOW = 20
"""Of ended episodes, for the mean return."""


@dataclass(frozen=True, slots=True)
class PolicyTrainerConfig:
    """How a policy learns.

    Attributes:
        optimiser: AdamW's settings; a minibatch is one of its steps.
        advantage: `gae`, with the policy's value; or `grpo` over episodes with the same seed.
        by_success: With grpo: an episode's reward is 1 for a success, not the sum of its rewards.
        gamma: Discount of a later reward, a decision.
        lam: How far advantages trust later rewards (1) over the next value (0).
        epochs: Passes over the decisions of an iteration.
        minibatch: Decisions of an optimiser step.
        clip: Of the ratio of probabilities.
        value_coefficient: Weight of the value loss.
        value_clip: How far values may move from what they were; None: no bound.
        entropy_coefficient: Weight of the entropy, which is made larger.
        normalise: Whether advantages are whitened within a minibatch (gae only).
        target_kl: No further pass once the policy has moved so far; 0: no bound.
        rows: Observations that are evaluated at once where no gradient is needed.
        seed: Of the minibatches.
    """

    optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(lr=3e-4, warmup_steps=0, beta2=0.999, clip_norm=0.5)
    )
    advantage: Literal["gae", "grpo"] = "gae"
    by_success: bool = False
    gamma: Share = 0.99
    lam: Share = 0.95
    epochs: Count = 10
    minibatch: Count = 64
    clip: Clip = field(default_factory=Clip)
    value_coefficient: NonNegative = 0.5
    value_clip: Positive | None = None
    entropy_coefficient: NonNegative = 0.0
    normalise: bool = True
    target_kl: NonNegative = 0.0
    rows: Count = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """One iteration of learning.

    Attributes:
        version: Of the weights after it.
        steps: Actions that were carried out.
        decisions: That were learnt from.
        episodes: That ended.
        lost: Episodes whose process was lost.
        reward: Mean return of the last 20 episodes that ended; nan before the first.
        success: Share of successes among the same.
        updates: Optimiser steps.
        policy_loss: Mean over them, as the three below.
        value_loss: See `policy_loss`.
        entropy: See `policy_loss`.
        grad_norm: See `policy_loss`.
        kl: Mean k3 estimate of KL(old || new) in the last pass.
        clipped: Share of decisions in the last pass whose gradient was cut.
        explained: 1 - mean squared error / variance of the value targets, before learning.
    """

    version: int
    steps: int
    decisions: int
    episodes: int
    lost: int
    reward: float
    success: float
    updates: int
    policy_loss: float
    value_loss: float
    entropy: float
    grad_norm: float
    kl: float
    clipped: float
    explained: float

    def metrics(self) -> dict[str, float]:
        """The iteration as numbers by name; there is no reward before an episode has ended."""
        numbers = {name: float(getattr(self, name)) for name in self.__slots__}
        numbers |= {"env_steps": numbers.pop("steps"), "staleness": 0.0}
        return {name: value for name, value in numbers.items() if not math.isnan(value)}


class PolicyTrainer:
    """Learns from trajectories. The result does not depend on how they were cut into calls.

    Not thread-safe.
    """

    def __init__(self, policy: Policy, config: PolicyTrainerConfig | None = None) -> None:
        if not isinstance(policy, nn.Module):
            raise TypeError(f"{type(policy).__name__} is no torch module")
        self._config = config or PolicyTrainerConfig()
        self.policy, self._module = policy, policy
        self._named = dict(policy.named_parameters())
        self._device = next(iter(self._named.values())).device
        self._buckets = Buckets(p for p in policy.parameters() if p.requires_grad)
        self._optimiser = Optimiser(self._buckets.flat, self._config.optimiser)
        # Its products are so small that a second thread only adds the wait for it.
        self._is_light = policy.actor().light
        self._held: list[Trajectory] = []
        self._returns: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        self._version = 0

    @property
    def version(self) -> int:
        """Iterations that have changed the weights."""
        return self._version

    def accumulate(self, trajectories: Sequence[Trajectory]) -> int:
        """Take these in; actions they hold. Nothing is learnt before `finish_step`."""
        self._held += trajectories
        return sum(one.token_count for one in trajectories)

    def finish_step(self) -> PolicyStats:
        """Learn from everything that was taken in. Raises `NonFiniteGradient`."""
        held, self._held = self._held, []
        ended = [e for one in held for e in one.episodes]
        self._returns += [(e.reward, e.success) for e in ended if not e.lost]
        with _threads(1) if self._is_light else contextlib.nullcontext():
            decisions = self._settle(held) if held else None
            learnt = self._learn(decisions) if decisions is not None and len(decisions) else {}
        self._version += bool(learnt)
        count = max(len(self._returns), 1)
        numbers: dict[str, Any] = dict.fromkeys(PolicyStats.__slots__, 0) | learnt
        numbers |= {
            "version": self._version,
            "steps": sum(one.token_count for one in held),
            "episodes": sum(not e.lost for e in ended),
            "lost": sum(e.lost for e in ended),
            "reward": sum(r for r, _ in self._returns) / count if self._returns else math.nan,
            "success": sum(won for _, won in self._returns) / count,
        }
        return PolicyStats(**numbers)

    def _settle(self, held: Sequence[Trajectory]) -> Flat:
        batch, config = grid(held), self._config
        with torch.no_grad():
            if config.advantage == "grpo":
                advantages = episode_advantages(batch, config.by_success)
                blank = torch.zeros_like(batch.rewards)
                return flat(batch, advantages, blank, blank)
            return flat(batch, *stream_advantages(batch, self._values, config.gamma, config.lam))

    def _values(self, shown: Mapping[str, Tensor]) -> Tensor:
        """Evaluated in parts of `rows`."""
        rows = self._config.rows
        count = len(next(iter(shown.values())))
        parts = [
            self.policy.values({n: t[at : at + rows].to(self._device) for n, t in shown.items()})
            for at in range(0, count, rows)
        ]
        return torch.cat(parts).float().cpu()

    def _learn(self, decisions: Flat) -> dict[str, float]:
        config, sums, updates, moved = self._config, torch.zeros(4), 0, torch.zeros(2)
        error = (decisions.targets - decisions.values).square().mean()
        variance = float(decisions.targets.var(unbiased=False))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self._version)
        parts = -(-len(decisions) // config.minibatch)
        ends = (torch.arange(parts + 1) * len(decisions) // parts).tolist()
        for epoch in range(config.epochs):
            watch = bool(config.target_kl) or epoch == config.epochs - 1
            moved.zero_()
            shuffled = decisions[torch.randperm(len(decisions), generator=generator)]
            for begin, end in itertools.pairwise(ends):
                loss, losses = self._update(shuffled[begin:end])
                sums += losses
                moved += _moved(loss) if watch else 0
            updates += parts
            if config.target_kl and float(moved[0]) / parts > config.target_kl:
                break
        means = (sums / updates).tolist()
        return {
            "decisions": len(decisions),
            "updates": updates,
            "policy_loss": means[0],
            "value_loss": means[1],
            "entropy": means[2],
            "grad_norm": means[3],
            "kl": float(moved[0]) / parts,
            "clipped": float(moved[1]) / parts,
            "explained": 1 - float(error) / variance if variance > 1e-12 else 0.0,
        }

    def _update(self, part: Flat) -> tuple[PolicyLoss, Tensor]:
        """One optimiser step; its policy, value loss, entropy and norm, [4]."""
        config = self._config
        shown = {name: tensor.to(self._device) for name, tensor in part.shown.items()}
        found = self.policy.evaluate(shown, part.choices.to(self._device))
        advantages = part.advantages.to(self._device)
        if config.normalise and config.advantage == "gae" and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        old = part.logprobs.to(self._device)
        loss = ppo_clip(found.logprobs, old, advantages, config.clip)
        policy, entropy = loss.loss.mean(), found.entropy.mean()
        total, values = policy, policy.new_zeros(())
        if config.entropy_coefficient:
            total = total - config.entropy_coefficient * entropy
        if config.advantage == "gae":
            before, targets = part.values.to(self._device), part.targets.to(self._device)
            values = value_loss(found.values, before, targets, config.value_clip).mean()
            total = total + 2 * config.value_coefficient * values
        total.backward()  # type: ignore[no-untyped-call]
        norm = self._optimiser.step(1.0)
        self._buckets.clear()
        with torch.no_grad():
            return loss, torch.stack([policy, values, entropy, policy.new_tensor(norm)]).cpu()

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Tensor]:
        """The parameters by name, as they are now (not copies): what is published."""
        return state_of(self._module)

    def save(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What decides the iterations to come. Raises `ValueError` in the middle of one."""
        if self._held:
            raise ValueError("finish the step before saving")
        tensors = {f"model.{name}": p.detach() for name, p in self._named.items()}
        moments = self._optimiser.state(self._names())
        tensors |= {f"optimiser.{name}": tensor for name, tensor in moments.items()}
        tensors["returns"] = torch.tensor([list(map(float, r)) for r in self._returns]).view(-1, 2)
        return tensors, {"version": self._version, "optimiser_calls": self._optimiser.calls}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what `save` described. Raises `WeightsMismatch`, with nothing changed."""

        def part(kind: str) -> dict[str, Tensor]:
            return {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}

        load_state(self.state(), part("model."), complete=True)
        self._optimiser.load(self._names(), part("optimiser."), numbers["optimiser_calls"])
        self._buckets.clear()
        self._returns.clear()
        self._returns += [(float(r), bool(won)) for r, won in tensors["returns"].tolist()]
        self._held, self._version = [], numbers["version"]

    def onload(self) -> None:
        """See `Residency`."""
        self._move(self._device)

    def offload(self) -> None:
        """See `Residency`."""
        self._move(torch.device("cpu"))

    def resident_bytes(self) -> int:
        """Bytes of parameters, gradients and optimiser state on the device."""
        return nbytes(self._tensors(), self._device)

    def _move(self, device: torch.device) -> None:
        move(self._tensors(), device)
        self._buckets.attach()

    def _tensors(self) -> list[Tensor]:
        frozen = [p for p in self._named.values() if not p.requires_grad]
        return [*frozen, *self._buckets.flat, *self._optimiser.tensors()]

    def _names(self) -> list[str]:
        return [f"bucket{number}" for number in range(len(self._buckets.flat))]


def _moved(loss: PolicyLoss) -> Tensor:
    """How far the policy has moved: mean k3 of old || new, and share of what was cut, [2]."""
    drift = loss.ratio - 1 - loss.ratio.log()  # k3: r - 1 - log r
    return torch.stack([drift.mean(), loss.clipped.float().mean()]).cpu()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads, in all of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

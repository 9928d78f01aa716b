"""The trainer of policies that act: PPO or GRPO over trajectories.

Source: PPO, Schulman et al. 2017, arXiv:1707.06347, in the form that Andrychowicz et al. 2020,
arXiv:2006.05990, found to work: several passes over shuffled minibatches, advantages normalised
within each.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.losses import PolicyLoss
from rlinf.workers.engines.buckets import Buckets
from rlinf.workers.engines.optimiser import Optimiser
from rlinf.workers.engines.parameters import OneDevice, load_state, state_of
from rlinf.workers.engines.policy_learning import PolicyStats, PolicyTrainerConfig
from rlinf.workers.engines.policy_slopes import slopes
from rlinf.workers.engines.trajectory_batch import (
    Flat,
    episode_advantages,
    flat,
    grid,
    stream_advantages,
)
from rlinf.workers.engines.vision_tower import VisionTower
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.policy import Policy
from rlinf.workers.roles.simulator import Trajectory
from rlinf.workers.team import Team

__all__ = ["PolicyStats", "PolicyTrainer", "PolicyTrainerConfig"]

WINDOW = 20
"""Of ended episodes, for the mean return."""


class PolicyTrainer(OneDevice):
    """Learns from trajectories. The result does not depend on how they were cut into calls.

    Not thread-safe.

    Args:
        policy: Every rank has it whole, beginning alike.
        config: See there.
        team: Ranks that learn together: each takes its share of a minibatch, and the sum of the
            gradients is what one rank alone would have.

    Raises:
        ConfigError: A vision tower is to learn as it cannot.
    """

    def __init__(
        self, policy: Policy, config: PolicyTrainerConfig | None = None, team: Team | None = None
    ) -> None:
        if not isinstance(policy, nn.Module):
            raise TypeError(f"{type(policy).__name__} is no torch module")
        self._config = config = config or PolicyTrainerConfig()
        self._team = team or Team()
        self.policy, self._module = policy, policy
        self._named = dict(policy.named_parameters())
        self._device = next(iter(self._named.values())).device
        self.tower = _tower(policy, config, self._team)
        self._buckets = Buckets(_parts(policy, config))
        self._norm = torch.zeros(())
        self._optimisers = [
            Optimiser(flat, config.optimiser, lambda: self._norm) for flat in self._buckets.flat
        ]
        # Its products are so small that a second thread only adds the wait for it.
        self._is_light = policy.actor().light
        self._held: list[Trajectory] = []
        self._returns: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        self._version = 0

    @property
    def version(self) -> int:
        """Iterations that have changed the weights."""
        return self._version

    def adopt(self) -> None:
        """Go on from a policy that somebody else has trained meanwhile."""
        self._buckets.attach()
        if self.tower is not None:
            self.tower.adopt()

    def accumulate(self, trajectories: Sequence[Trajectory]) -> int:
        """Take these in; actions they hold. Nothing is learnt before `finish_step`."""
        self._held += trajectories
        return sum(one.token_count for one in trajectories)

    def finish_step(self) -> PolicyStats:
        """Learn from everything that was taken in. Raises `NonFiniteGradient`."""
        held, self._held = [t for own in self._team.gather(self._held) for t in own], []
        ended = [e for one in held for e in one.episodes]
        oldest = min((one.version for one in held), default=self._version)
        staleness = self._version - oldest
        self._returns += [(e.reward, e.success) for e in ended if not e.lost]
        if self.tower is not None:
            self.tower.catch_up()
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
            "staleness": staleness,
            "reward": sum(r for r, _ in self._returns) / count if self._returns else math.nan,
            "success": sum(won for _, won in self._returns) / count,
        }
        return PolicyStats(**numbers)

    def _settle(self, held: Sequence[Trajectory]) -> Flat:
        batch, config = grid(held), self._config
        if self.tower is not None and not self.tower.joins(self._version):
            shown, finals = self.tower.look(batch.shown), self.tower.look(batch.finals)
            batch = replace(batch, shown=shown, finals=finals)
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
        sizes = (torch.arange(parts + 1) * len(decisions) // parts).diff().tolist()
        lesson: list[tuple[Tensor, Tensor]] = []
        for epoch in range(config.epochs):
            watch = bool(config.target_kl) or epoch == config.epochs - 1
            moved.zero_()
            rows = torch.randperm(len(decisions), generator=generator)
            for part in decisions.take(rows).cut(sizes):
                loss, losses = self._update(part, lesson if epoch == 0 else None)
                sums += losses
                moved += _moved(loss, len(part)) if watch else 0
            updates += parts
            if watch:
                self._team.add(moved)
            if config.target_kl and float(moved[0]) / parts > config.target_kl:
                break
        self._end_pass(lesson)
        self._team.add(sums)
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

    def _end_pass(self, lesson: list[tuple[Tensor, Tensor]]) -> None:
        """What an iteration means for the tower."""
        if self.tower is None:
            return
        if self.tower.joins(self._version):
            self.tower.joined()
        elif lesson:
            self.tower.teach(lesson)

    def _update(
        self, part: Flat, lesson: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[PolicyLoss, Tensor]:
        """One optimiser step; this rank's part of its policy, value loss, entropy and norm, [4]."""
        config, count, pictures = self._config, len(part), part.shown.get("image")
        part = part.to(self._device)
        advantages = part.advantages
        if config.normalise and config.advantage == "gae" and count > 1:
            deviation, mean = torch.std_mean(advantages)
            advantages = (advantages - mean) / (deviation + 1e-8)
        if self._team.size > 1:
            own = torch.arange(self._team.rank, count, self._team.size, device=self._device)
            part, advantages = part.take(own), advantages.index_select(0, own)
        taught = lesson is not None and self.tower is not None and self.tower.is_late
        if taught:
            part.shown["features"].requires_grad_()
        found = self.policy.evaluate(part.shown, part.choices)
        told = slopes(found, part, advantages, count, config)
        found.backward(*told.answers)
        if taught and lesson is not None and pictures is not None:
            slope = part.shown["features"].grad
            lesson += [] if slope is None else [(pictures, slope.cpu())]
        norm = self._step() if self._team.rank == 0 else 0 * self._step()
        return told.policy, torch.cat([told.sums, told.sums.new_full((1,), norm)]).cpu()

    def _step(self) -> float:
        """Sum everybody's gradients, step with those parts that learn now; the norm before."""
        for gradient in self._buckets.gradients:
            self._team.add(gradient)
        self._norm = self._buckets.norm()
        joins = self.tower is None or self.tower.joins(self._version)
        norms = [one.step(1.0) for one in self._optimisers[: None if joins else 1]]
        self._buckets.clear()
        return norms[0]

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Tensor]:
        """The parameters by name, as they are now (not copies): what is published."""
        return state_of(self._module)

    def save(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What decides the iterations to come. Raises `ValueError` in the middle of one."""
        if self._held:
            raise ValueError("finish the step before saving")
        numbers = {"version": self._version}
        kept: dict[str, Tensor] = {}
        if self.tower is not None:
            self.tower.catch_up(0)
            tensors, more = self.tower.save()
            kept |= {f"tower.{name}": tensor for name, tensor in tensors.items()}
            numbers |= {f"tower_{name}": number for name, number in more.items()}
        kept |= {f"model.{name}": p.detach() for name, p in self._named.items()}
        for index, optimiser in enumerate(self._optimisers):
            moments = optimiser.state(self._names(index))
            kept |= {f"optimiser{index}.{name}": tensor for name, tensor in moments.items()}
            numbers[f"optimiser{index}_calls"] = optimiser.calls
        kept["returns"] = torch.tensor([list(map(float, r)) for r in self._returns]).view(-1, 2)
        return kept, numbers

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what `save` described. Raises `WeightsMismatch`, with nothing changed."""

        def part(kind: str) -> dict[str, Tensor]:
            return {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}

        load_state(self.state(), part("model."), complete=True)
        for index, optimiser in enumerate(self._optimisers):
            calls = numbers[f"optimiser{index}_calls"]
            optimiser.load(self._names(index), part(f"optimiser{index}."), calls)
        self._buckets.clear()
        if self.tower is not None:
            own = {n.removeprefix("tower_"): k for n, k in numbers.items()}
            self.tower.restore(part("tower."), own | {"version": numbers["tower_version"]})
        self._returns.clear()
        self._returns += [(float(r), bool(won)) for r, won in tensors["returns"].tolist()]
        self._held, self._version = [], numbers["version"]

    def onload(self) -> None:
        """See `Residency`."""
        super().onload()
        self._buckets.attach()

    def offload(self) -> None:
        """See `Residency`."""
        super().offload()
        self._buckets.attach()

    def _tensors(self) -> list[Tensor]:
        learnt = {id(p) for bucket in self._buckets.members for p in bucket}
        rest = [p for p in self._named.values() if id(p) not in learnt]
        moments = [t for one in self._optimisers for t in one.moments()]
        return [*rest, *self._buckets.tensors(), *moments]

    def _names(self, index: int) -> list[str]:
        return [f"bucket{number}" for number in range(len(self._buckets.flat[index]))]


def _tower(policy: Policy, config: PolicyTrainerConfig, team: Team) -> VisionTower | None:
    """The policy's tower; None where it has none, or it is not to be told from the rest."""
    if config.vision.update == "joint":
        return None
    module = getattr(policy, "vision", None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"trainer.vision.update={config.vision.update}, but {type(policy).__name__} has no "
            "vision tower here"
        )
    if config.vision.update == "late" and team.size > 1:
        raise ConfigError("trainer.vision.update=late needs a trainer of one rank")
    return VisionTower(module, config.vision, config.optimiser)


def _parts(policy: nn.Module, config: PolicyTrainerConfig) -> list[list[nn.Parameter]]:
    """What learns: everything but a tower of its own, and such a tower if it joins at times."""
    update, every = config.vision.update, [p for p in policy.parameters() if p.requires_grad]
    if update == "joint":
        return [every]
    tower = {id(p) for p in policy.get_submodule("vision").parameters()}
    rest = [p for p in every if id(p) not in tower]
    return [rest, [p for p in every if id(p) in tower]] if update == "every" else [rest]


def _moved(loss: PolicyLoss, count: int) -> Tensor:
    """How far the policy has moved: k3 of old || new, and what was cut, as shares of `count`, [2].

    k3: r - 1 - log r.
    """
    drift = loss.ratio - 1 - loss.ratio.log()
    return (torch.stack([drift.sum(), loss.clipped.float().sum()]) / count).cpu()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads, in all of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

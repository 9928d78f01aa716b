"""Trajectories as the tensors that a policy learns from: side by side, with their advantages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.workers.algorithms.advantages import gae_stream, grpo
from rlinf.workers.roles.simulator import Array, Trajectory

__all__ = ["Flat", "Grid", "episode_advantages", "flat", "grid", "stream_advantages"]

Values = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """T decisions of E environments: `Trajectory`'s arrays of all lanes, as tensors.

    `ends` [K, 2] and `finals` [K, ...] are those of all lanes, with e counted over all of them.
    """

    shown: Mapping[str, Tensor]
    choices: Tensor
    logprobs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    finals: Mapping[str, Tensor]
    ends: Tensor
    seeds: Tensor
    lost: Tensor
    success: Tensor


def grid(trajectories: Sequence[Trajectory]) -> Grid:
    """Lanes side by side, in the order of their environments, whichever came first."""
    ordered = sorted(trajectories, key=lambda one: int(one.environments[0]))

    def beside(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(one, name) for one in ordered], 1))

    first = np.cumsum([0, *(len(one.environments) for one in ordered)])
    ends = [one.ends + np.array([0, at]) for one, at in zip(ordered, first, strict=False)]
    lost = {e.environment for one in ordered for e in one.episodes if e.lost}
    won = {e.environment for one in ordered for e in one.episodes if e.success}
    indexes = [int(i) for one in ordered for i in one.environments]
    return Grid(
        shown=_joined([one.observations for one in ordered], 1),
        choices=beside("choices"),
        logprobs=beside("logprobs"),
        rewards=beside("rewards"),
        terminated=beside("terminated"),
        truncated=beside("truncated"),
        valid=beside("valid"),
        finals=_joined([one.finals for one in ordered], 0),
        ends=torch.from_numpy(np.concatenate(ends)).long(),
        seeds=torch.from_numpy(np.concatenate([one.seeds for one in ordered])),
        lost=torch.tensor([i in lost for i in indexes]),
        success=torch.tensor([i in won for i in indexes]),
    )


def _joined(parts: Sequence[Mapping[str, Array]], axis: int) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.concatenate([part[name] for part in parts], axis))
        for name in parts[0]
    }


def stream_advantages(
    batch: Grid, values: Values, gamma: float, lam: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, value targets and the values themselves, each [T, E]; see `gae_stream`.

    `values` is asked once, about everything that was shown. Decisions that are not valid end what
    came before, and get 0.
    """
    count = batch.rewards.numel() + batch.rewards.shape[1]
    everything = {
        name: torch.cat([shown.flatten(0, 1), batch.finals[name]])
        for name, shown in batch.shown.items()
    }
    known = values(everything)
    rows = known[:count].view(-1, batch.rewards.shape[1])
    after = rows[1:].clone()
    after[batch.ends[:, 0], batch.ends[:, 1]] = known[count:]
    here = torch.where(batch.valid, rows[:-1], 0)
    advantages, targets = gae_stream(
        batch.rewards,
        here,
        torch.where(batch.valid, after, 0),
        (batch.terminated, batch.truncated | ~batch.valid),
        gamma=gamma,
        lam=lam,
    )
    return advantages, targets, here


def episode_advantages(batch: Grid, by_success: bool) -> Tensor:
    """[T, E]: GRPO over the episodes that began with the same seed, one an environment.

    The reward of an episode is the sum of its rewards, or 1 for a success. Lost ones do not count.
    """
    rewards = batch.success.float() if by_success else batch.rewards.sum(0)
    result = torch.zeros_like(rewards)
    for seed in set(batch.seeds.tolist()):
        members = batch.seeds == seed
        result[members] = grpo(rewards[members], ~batch.lost[members])
    return result.expand_as(batch.rewards)


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """The valid decisions one after another: what minibatches are drawn from."""

    shown: Mapping[str, Tensor]
    choices: Tensor
    logprobs: Tensor
    advantages: Tensor
    targets: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.logprobs)

    def to(self, device: torch.device) -> "Flat":
        """The same on a device."""
        shown = {name: tensor.to(device) for name, tensor in self.shown.items()}
        return Flat(shown, *(tensor.to(device) for tensor in self._rest()))

    def take(self, rows: Tensor) -> "Flat":
        """Those of these indexes, in their order."""
        return Flat(
            {name: shown.index_select(0, rows) for name, shown in self.shown.items()},
            *(tensor.index_select(0, rows) for tensor in self._rest()),
        )

    def cut(self, sizes: list[int]) -> "list[Flat]":
        """Runs of so many, as views."""
        shown = [torch.split(tensor, sizes) for tensor in self.shown.values()]
        rest = zip(*(torch.split(tensor, sizes) for tensor in self._rest()), strict=True)
        return [
            Flat(dict(zip(self.shown, own, strict=True)), *others)
            for own, others in zip(zip(*shown, strict=True), rest, strict=True)
        ]

    def _rest(self) -> tuple[Tensor, ...]:
        return self.choices, self.logprobs, self.advantages, self.targets, self.values


def flat(batch: Grid, advantages: Tensor, targets: Tensor, values: Tensor) -> Flat:
    """The valid decisions with what is known of them."""
    kept = batch.valid
    return Flat(
        {name: shown[:-1][kept] for name, shown in batch.shown.items()},
        batch.choices[kept],
        batch.logprobs[kept],
        advantages[kept],
        targets[kept],
        values[kept],
    )

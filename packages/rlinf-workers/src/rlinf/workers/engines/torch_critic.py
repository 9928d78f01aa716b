"""The embedded critic: a causal LM's trunk with a value head, and generalised advantages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.advantages import gae
from rlinf.workers.algorithms.losses import value_loss
from rlinf.workers.algorithms.masking import at_least_float32, masked_sum
from rlinf.workers.engines.backbone import backbone_of
from rlinf.workers.engines.critic_config import CriticConfig
from rlinf.workers.engines.layers import head_of_zeros
from rlinf.workers.engines.optimiser import Optimiser
from rlinf.workers.engines.parameters import Served, load_state
from rlinf.workers.engines.policy_batch import padded, runs
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.roles.critic import CriticStats
from rlinf.workers.roles.reward import ScoredGroup
from rlinf.workers.roles.rollout import FloatArray
from rlinf.workers.team import Team

__all__ = ["CriticConfig", "TorchCritic"]

Places = npt.NDArray[np.intp]


@dataclass(slots=True)
class _Sums:
    """Of the tokens that a step has seen, in float64."""

    loss: float = 0.0
    value: float = 0.0
    target: float = 0.0
    squared_target: float = 0.0
    tokens: int = 0

    def __add__(self, other: "_Sums") -> "_Sums":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return _Sums(*(one + another for one, another in pairs))


class TorchCritic(Served):
    """A `CriticEngine` on one device. Not thread-safe.

    The value of a token is that of the state before it: read from the hidden state that predicts
    the token. The head begins at 0, so the first advantages are the rewards themselves. A response
    that was cut off at its longest ended for the task as well: nothing is bootstrapped after it.
    A policy's weights go into the trunk; the head stays.

    With a `team`, `finish_step` is collective: every rank has the same model, and makes the step of
    all their samples. Which rank was given which is of no matter but for rounding.
    """

    def __init__(
        self, model: nn.Module, config: CriticConfig | None = None, team: Team | None = None
    ) -> None:
        self._config = config or CriticConfig()
        self._team = team or Team()
        self._model = model
        self._backbone = backbone_of(model)
        weight: Any = model.get_output_embeddings().weight  # type: ignore[operator]
        self._device: torch.device = weight.device
        self._head = head_of_zeros(weight.shape[1], weight)
        self._optimiser = Optimiser(self._named().values(), self._config.optimiser)
        self._sums = _Sums()

    def estimate(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """See `CriticEngine`; samples without a reward get the advantage 0."""
        found: list[ScoredGroup] = []
        for micro in runs(groups, self._config.micro_batch_tokens):
            found += self._backward(micro)
        return found

    def finish_step(self) -> CriticStats:
        """See `CriticEngine`. Raises `NonFiniteGradient`; the step's samples are dropped then."""
        sums, self._sums = sum(self._team.gather(self._sums), _Sums()), _Sums()
        self._add_gradients()
        norm = self._optimiser.step(float(sums.tokens))
        count = max(sums.tokens, 1)
        variance = sums.squared_target / count - (sums.target / count) ** 2
        error = 2 * sums.loss / count
        return CriticStats(
            loss=sums.loss / count,
            grad_norm=norm,
            value=sums.value / count,
            explained=1 - error / variance if variance > 1e-12 else 0.0,
            tokens=sums.tokens,
        )

    def save(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What decides the steps to come: tensors (not copies) and numbers, each by name.

        Rank 0 has the tensors, which are alike. Raises `ValueError` in the middle of a step.
        """
        if self._sums != _Sums():
            raise ValueError("finish the critic's step before saving")
        numbers = {"version": self._version, "optimiser_calls": self._optimiser.calls}
        if self._team.rank:
            return {}, numbers
        named = self._named()
        model = {f"model.{name}": p.detach() for name, p in named.items()}
        moments = self._optimiser.state(list(named))
        tensors = model | {f"optimiser.{name}": tensor for name, tensor in moments.items()}
        return tensors, numbers

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what `save` described; a step that was begun is forgotten.

        Raises `WeightsMismatch`, with nothing changed, when they are those of another model.
        """
        named = self._named()
        parts = {
            kind: {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}
            for kind in ("model.", "optimiser.")
        }
        load_state({n: p.detach() for n, p in named.items()}, parts["model."], complete=True)
        self._optimiser.load(list(named), parts["optimiser."], numbers["optimiser_calls"])
        self._version, self._sums = numbers["version"], _Sums()

    def _named(self) -> dict[str, nn.Parameter]:
        head = {f"value_head.{name}": p for name, p in self._head.named_parameters()}
        return dict(self._model.named_parameters()) | head

    def _add_gradients(self) -> None:
        """Have everybody's sum on every rank."""
        if self._team.size == 1:
            return
        parameters = list(self._named().values())
        blank = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        whole = torch.cat([gradient.flatten() for gradient in blank])
        self._team.add(whole)
        pieces = torch.split(whole, [p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._named().values()
        yield from self._optimiser.tensors()

    def _values(self, batch: PrefixBatch) -> Tensor:
        """The value before each response token, float32 [rows, T]."""
        hidden, source = self._backbone.hidden(batch)
        values = at_least_float32(self._head(hidden))[:, 0]
        return batch.responses.spread(values.index_select(0, source))

    def _backward(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Values, advantages and the gradient of the value loss, of one micro-batch."""
        kept = [np.flatnonzero(group.group.lengths) for group in groups]
        blank: list[FloatArray] = [
            np.zeros(group.group.tokens.shape, np.float32) for group in groups
        ]
        if any(map(len, kept)):
            advantages = self._learn(groups, kept)
            ends = np.cumsum([len(rows) for rows in kept])
            for wide, rows, own in zip(blank, kept, np.split(advantages, ends[:-1]), strict=True):
                wide[rows] = own[:, : wide.shape[1]]
        return [replace(g, advantages=wide) for g, wide in zip(groups, blank, strict=True)]

    def _learn(self, groups: Sequence[ScoredGroup], kept: Sequence[Places]) -> FloatArray:
        """The advantages of the rows that have tokens, float32 [rows, T]."""
        chosen = list(zip(groups, kept, strict=True))
        batch = PrefixBatch.of(
            [(g.group.prompt_ids, g.group.tokens[k], g.group.lengths[k]) for g, k in chosen],
            self._device,
        )
        width = batch.responses.width
        mask = padded([g.learnable[k].astype(np.float32) for g, k in chosen], width, self._device)
        rewards = padded([g.token_rewards[k] for g, k in chosen], width, self._device)
        values = self._values(batch)
        advantages, targets = gae(
            rewards.to(values.dtype),
            values.detach(),
            mask,
            gamma=self._config.gamma,
            lam=self._config.lam,
        )
        loss = masked_sum(value_loss(values, values.detach(), targets), mask)
        loss.backward()  # type: ignore[no-untyped-call]
        self._count(values.detach(), targets, mask, float(loss.detach()))
        found: FloatArray = advantages.float().cpu().numpy()
        return found

    def _count(self, values: Tensor, targets: Tensor, mask: Tensor, loss: float) -> None:
        sums, exact = self._sums, targets.double()
        sums.loss += loss
        sums.value += float(masked_sum(values.double(), mask))
        sums.target += float(masked_sum(exact, mask))
        sums.squared_target += float(masked_sum(exact.square(), mask))
        sums.tokens += int((mask != 0).sum())

"""A trainer of a model that is split among the ranks of a group.

    accumulate    every rank keeps the groups that it was given
    end_round     they tell each other: from now on everybody has all of them
    finish_step   everybody works out the same advantages and the same cut into shares of equal
                  work, trains on its own share, and the sums of all are added

So which rank was given what has no influence on a step, and nor has the number of ranks: losses are
summed, never averaged, and divided once by the weight of all. How the model is split is the
business of a `ShardedModel`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.balance import partition
from rlinf.workers.engines.layout import Piece, check, fill, parts
from rlinf.workers.engines.lora import merged
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.policy_batch import MicroBatch, TrainRows, cut, pieces
from rlinf.workers.engines.policy_step import Pair, policy_loss, settle, supervised_rows
from rlinf.workers.engines.prefix_batch import PrefixBatch, Rows
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.roles.reward import ScoredGroup
from rlinf.workers.roles.rollout import Sampling
from rlinf.workers.roles.trainer import PartialStats, StepStats
from rlinf.workers.shards import Shard
from rlinf.workers.team import Team

__all__ = ["Micro", "ShardedModel", "ShardedTrainer", "shares"]

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """What goes through the model at once.

    Attributes:
        rows: Prompts and responses.
        sampling: How they were drawn.
        loss: (layout of `rows`, log-probs [R] of the response tokens) -> the summed loss.
    """

    rows: Sequence[Rows]
    sampling: Sampling
    loss: Callable[[PrefixBatch, Tensor], Tensor]


class ShardedModel(Protocol):
    """A model of which every rank holds a part.

    Attributes:
        data: Which of how many equal shares of the samples is this rank's.
        reports: This rank sees the losses, and is the one of those that see them to say so.
        vocabulary: Number of logits.
        trainable: This rank's own parameters that learn, by names of its own.
        pieces: What they, and all others, are parts of.
    """

    data: tuple[int, int]
    reports: bool
    vocabulary: int
    trainable: Mapping[str, nn.Parameter]
    pieces: Sequence[Piece]

    def tensors(self) -> Mapping[str, Tensor]:
        """All of this rank's own parameters by the names in `pieces`, not copies."""

    def run(self, micros: Sequence[Micro]) -> None:
        """Add the gradients of all losses of all ranks to those of the parameters."""

    def norm(self) -> Tensor:
        """The norm of the gradient of the whole model, a scalar; the same on all ranks."""

    def move(self, tensors: Sequence[Tensor], *, away: bool) -> None:
        """Bring the parameters and these tensors onto the device, or away from it."""

    def resident_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of the parameters and these tensors on the device."""


def shares(rows: Sequence[TrainRows], count: int) -> list[list[TrainRows]]:
    """Cut rows into `count` shares of equal work, as equal as can be had quickly.

    A group is cut only where it is large in comparison: its prompt is read once in each part.
    """
    total = sum(group.cost[0] for group in rows)
    small = list(pieces(rows, max(1, total // (4 * count)))) if count > 1 else list(rows)
    return [[small[i] for i in part] for part in partition([g.cost[0] for g in small], count)]


class ShardedTrainer:
    """A `TrainerEngine` of one rank. Every method but `accumulate` is collective. Not thread-safe.

    The model is in eval mode throughout, as that of `TorchTrainer`.
    """

    def __init__(self, model: ShardedModel, config: TrainerConfig, team: Team) -> None:
        self._model, self._config, self._team = model, config, team
        own = {piece.whole: piece.shape for piece in model.pieces}
        self._shapes = {n: s for shapes in team.gather(own) for n, s in shapes.items()}
        self._optimiser = self._make_optimiser(config.optimiser)
        self._supervised: Optimiser | None = None
        _ = config.divisor  # a missing constant is to be noticed now
        self._given: list[ScoredGroup] = []
        self._held: list[ScoredGroup] = []
        self._version = self._rounds = 0

    @property
    def version(self) -> int:
        """Number of policy steps that have changed the weights."""
        return self._version

    def state(self) -> Mapping[str, Tensor | Shard]:
        """This rank's boxes of the parameters, by transformers' names. See `TrainerEngine`.

        With adapters, which are added in: all of it on rank 0, nothing on the others.
        """
        own = parts(self._model.pieces, self._model.tensors())
        if self._config.lora is None:
            return own
        return merged(self._team.collect(own), self._config.lora)

    def accumulate(self, groups: Sequence[ScoredGroup]) -> PartialStats:
        """Keep the groups for the end of the step; nothing is computed before."""
        self._given += groups
        return PartialStats()

    def end_round(self) -> int:
        """See `TrainerEngine`; always 0 without dynamic sampling."""
        self._rounds += 1
        self._tell()
        dynamic = self._config.dynamic
        informative = sum(group.informative for group in self._held)
        return dynamic.lacking(informative, self._rounds) if dynamic else 0

    def finish_step(self) -> StepStats:
        """See `TorchTrainer.finish_step`."""
        self._tell()
        held, self._held, self._rounds = self._held, [], 0
        frozen = self._optimiser.calls < self._config.frozen_steps
        rows, parts = settle(held, self._config, self._version, frozen=frozen)
        share, count = self._model.data
        for one in self._team.gather(self._learn(shares(rows, count)[share])):
            parts += one
        stepped = parts.rows > 0 and not frozen
        self._supervised = None
        lr = self._optimiser.lr
        norm = self._optimiser.step(parts.weight if stepped else 0.0)
        stepped = norm > 0.0
        self._version += stepped
        return StepStats(self._version, stepped, lr, norm, parts)

    def sft_step(
        self,
        pairs: Sequence[Pair],
        config: OptimiserConfig,
        written: Sequence[npt.NDArray[np.bool_]] | None = None,
    ) -> float:
        """See `TorchTrainer.sft_step`; every rank is given all pairs."""
        if self._held or self._given:
            raise ValueError("finish the policy step before taking a supervised one")
        if self._supervised is None:
            self._supervised = self._make_optimiser(config)
        share, count = self._model.data
        rows = supervised_rows(pairs)
        masks = written or [np.ones(len(response), bool) for _, response in pairs]
        sizes = [len(prompt) + tokens.size for prompt, tokens, _ in rows]
        own = partition(sizes, count)[share]
        size = max(1, self._config.micro_batch_tokens // max(sizes))
        losses: list[float] = []

        def loss_of(chosen: Sequence[int]) -> Callable[[PrefixBatch, Tensor], Tensor]:
            counts = torch.from_numpy(np.concatenate([masks[i] for i in chosen]))

            def loss(_: PrefixBatch, logprobs: Tensor) -> Tensor:
                total = -logprobs[counts.to(logprobs.device)].sum()
                losses.append(float(total.detach()))
                return total

            return loss

        cuts = [own[start : start + size] for start in range(0, len(own), size)]
        self._model.run([Micro([rows[i] for i in c], Sampling(), loss_of(c)) for c in cuts])
        total = sum(self._team.gather(sum(losses) if self._model.reports else 0.0))
        tokens = sum(int(mask.sum()) for mask in masks)
        self._supervised.step(float(tokens))
        return total / tokens

    def save(self) -> tuple[dict[str, Shard], dict[str, int]]:
        """This rank's part of what decides the steps to come, and numbers, each by name.

        Raises `ValueError` in the middle of a policy step.
        """
        if self._held or self._given:
            raise ValueError("finish the policy step before saving")
        layout = self._model.pieces
        found = {f"model.{n}": s for n, s in parts(layout, self._model.tensors()).items()}
        moments = self._optimiser.state(list(self._model.trainable))
        for kind in MOMENTS:
            own = {n: moments[f"{kind}.{n}"] for n in self._model.trainable if moments}
            found |= {f"optimiser.{kind}.{n}": s for n, s in parts(layout, own).items()}
        return found, {"version": self._version, "optimiser_calls": self._optimiser.calls}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what ranks, however many, have saved; a step that was begun is forgotten.

        Args:
            tensors: Whole ones, under transformers' names.
            numbers: As `save` gave them.

        Raises:
            WeightsMismatch: They are those of another model; nothing has changed.
        """

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        layout, trainable = self._model.pieces, self._model.trainable
        check(self._shapes, under("model."))
        fill(layout, self._model.tensors(), under("model."))
        loaded: dict[str, Tensor] = {}
        for kind in MOMENTS:
            if whole := under(f"optimiser.{kind}."):
                check(self._shapes, whole, complete=False)
                step = kind == "step"
                own = {n: _blank(p, scalar=step) for n, p in trainable.items()}
                fill(layout, own, whole)
                loaded |= {f"{kind}.{n}": value for n, value in own.items()}
        self._optimiser.load(list(trainable), loaded, numbers["optimiser_calls"])
        self._version = numbers["version"]
        self._given, self._held, self._supervised, self._rounds = [], [], None, 0

    def onload(self) -> None:
        """Bring parameters, gradients and optimiser state onto the device. See `Residency`."""
        self._model.move(self._moments(), away=False)

    def offload(self) -> None:
        """Move them to host memory. See `Residency`."""
        self._model.move(self._moments(), away=True)

    def resident_bytes(self) -> int:
        """Bytes of parameters, gradients and optimiser state on the device."""
        return self._model.resident_bytes(self._moments())

    def _moments(self) -> list[Tensor]:
        supervised = [] if self._supervised is None else list(self._supervised.tensors())
        return [*self._optimiser.tensors(), *supervised]

    def _make_optimiser(self, config: OptimiserConfig) -> Optimiser:
        return Optimiser(self._model.trainable.values(), config, norm=self._model.norm)

    def _tell(self) -> None:
        """Let everybody have what each was given, in an order that does not depend on who."""
        given = [group for part in self._team.gather(self._given) for group in part]
        self._held += sorted(given, key=lambda group: group.group.uid)
        self._given = []

    def _learn(self, rows: Sequence[TrainRows]) -> PartialStats:
        """The gradient of this rank's share; what was counted, where this rank is to say it."""
        sums: list[PartialStats] = []

        def loss_of(micro: MicroBatch) -> Callable[[PrefixBatch, Tensor], Tensor]:
            def loss(batch: PrefixBatch, logprobs: Tensor) -> Tensor:
                total, counted = policy_loss(micro, batch, logprobs, self._config)
                sums.append(counted)
                return total

            return loss

        outputs = max(1, self._config.micro_batch_logits // self._model.vocabulary)
        micros = [
            Micro([part.rows for part in micro], micro[0].sampling, loss_of(micro))
            for micro in cut(rows, self._config.micro_batch_tokens, outputs)
        ]
        with self._team.watched():
            self._model.run(micros)
        return sum(sums, PartialStats()) if self._model.reports else PartialStats()


def _blank(parameter: Tensor, *, scalar: bool) -> Tensor:
    return torch.zeros(()) if scalar else torch.zeros_like(parameter, requires_grad=False)

"""The embedded trainer: policy gradients and supervised steps over any transformers causal LM."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.kl import KlKind, kl
from rlinf.workers.algorithms.losses import (
    Clip,
    Normalisation,
    PolicyLoss,
    cispo,
    gspo,
    ppo_clip,
    reduce,
)
from rlinf.workers.algorithms.masking import masked_sum
from rlinf.workers.bounds import Count, Natural, NonNegative
from rlinf.workers.engines.backbone import backbone_of
from rlinf.workers.engines.models import quick_bfloat16
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.parameters import move, nbytes, state_of
from rlinf.workers.engines.policy_batch import (
    AdvantageKind,
    MicroBatch,
    TrainRows,
    advantages_of,
    counted,
    cut,
    padded,
    train_rows,
)
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.reward import ScoredGroup
from rlinf.workers.roles.rollout import IntArray, Sampling
from rlinf.workers.roles.trainer import PartialStats, StepStats

__all__ = ["TorchTrainer", "TrainerConfig"]

Pair = tuple[IntArray, IntArray]
"""A prompt and the response that is to be learnt."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What the trainer does with a step's samples.

    Attributes:
        optimiser: AdamW's settings.
        advantage: How rewards become advantages, within each group.
        loss: Which policy loss.
        clip: Its bounds; None: those of its paper.
        normalisation: What the loss is divided by.
        old_logprobs: The old policy of the ratio. `rollout`: as recorded when sampling. `trainer`:
            this model before the step, for one on-policy step with a rollout of other precision;
            the ratio is then 1.
        kl_coefficient: Weight of the KL penalty; groups then need `reference_logprobs`.
        kl_kind: Which estimate of it.
        trainable_layers: Train only the last so many layers; 0: everything.
        autocast: Compute in bfloat16 where torch deems it safe and the device is quick at it;
            parameters stay as they are.
        min_batch_tokens: Groups wait until they have so many tokens together, or for the end of the
            step: small batches cost several times as much a token as large ones.
        micro_batch_tokens: Bound on the tokens that go through the model at once.
        micro_batch_logits: Bound on the logits (predicted tokens times vocabulary) at once.
    """

    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    advantage: AdvantageKind = "grpo"
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip: Clip | None = None
    normalisation: Normalisation = field(default_factory=Normalisation)
    old_logprobs: Literal["rollout", "trainer"] = "rollout"
    kl_coefficient: NonNegative = 0.0
    kl_kind: KlKind = "k2"
    trainable_layers: Natural = 0
    autocast: bool = False
    min_batch_tokens: Natural = 1024
    micro_batch_tokens: Count = 16384
    micro_batch_logits: Count = 1 << 26


class TorchTrainer:
    """A `TrainerEngine` on one device. Not thread-safe.

    The model is in eval mode throughout: dropout would make the log-probs of the trainer differ
    from those of the rollout, and a step depend on how its batch was cut.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig | None = None) -> None:
        self._config = config or TrainerConfig()
        self._model = model
        self._backbone = backbone_of(model)
        self._device = next(model.parameters()).device
        self._trainable = _select_trainable(model, self._config.trainable_layers)
        self._optimiser = Optimiser(self._trainable.values(), self._config.optimiser)
        self._supervised: Optimiser | None = None
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self._parts = PartialStats()
        self._waiting: list[TrainRows] = []
        self._version = 0

    @property
    def version(self) -> int:
        """Number of policy steps that have changed the weights."""
        return self._version

    @property
    def model(self) -> nn.Module:
        """The module it trains."""
        return self._model

    def state(self, *, trainable_only: bool = False) -> Mapping[str, Tensor]:
        """The parameters by name, as they are now (not copies)."""
        state = state_of(self._model)
        return {n: state[n] for n in self._trainable} if trainable_only else state

    def accumulate(self, groups: Sequence[ScoredGroup]) -> PartialStats:
        """Add the gradient of these groups to the step's, now or, if they are few, later.

        Returns what was counted in them and what was computed by this call. Raises `ConfigError`
        when the loss needs what the groups do not have.
        """
        parts = PartialStats()
        advantages = advantages_of(groups, self._config.advantage)
        for group, given in zip(groups, advantages, strict=True):
            rows = train_rows(group, given)
            parts += counted(group, rows, self._version)
            if rows is not None:
                self._require_known_ratio(rows.sampling)
                self._waiting.append(rows)
        if self._config.normalisation.kind == "constant":
            # Samples without a gradient are samples still.
            parts = replace(parts, weight=float(parts.dropped))
        if sum(rows.cost[0] for rows in self._waiting) >= self._config.min_batch_tokens:
            parts += self._backward_waiting()
        self._parts += parts
        return parts

    def finish_step(self) -> StepStats:
        """Divide the gradient by the step's weight, clip it, step, and begin the next step.

        Raises `NonFiniteGradient`; the step's samples are dropped then.
        """
        parts = self._parts + self._backward_waiting()
        self._parts = PartialStats()
        self._supervised = None
        stepped = parts.rows > 0
        lr = self._optimiser.lr
        norm = self._optimiser.step(parts.weight if stepped else 0.0)
        self._version += stepped
        return StepStats(self._version, stepped, lr, norm, parts)

    def sft_step(self, pairs: Sequence[Pair], config: OptimiserConfig) -> float:
        """One step of maximum likelihood on the responses, with an optimiser of its own.

        Returns the mean loss of a response token before the step. `config` counts at the first call
        only; the optimiser is forgotten at the first policy step. Raises `ValueError` in the middle
        of a policy step.
        """
        if self._parts != PartialStats():
            raise ValueError("finish the policy step before taking a supervised one")
        if self._supervised is None:
            self._supervised = Optimiser(self._trainable.values(), config)
        size = max(1, self._config.micro_batch_tokens // max(len(p) + len(r) for p, r in pairs))
        total = 0.0
        for start in range(0, len(pairs), size):
            rows = [
                (prompt, response[None], np.array([len(response)], np.int32))
                for prompt, response in pairs[start : start + size]
            ]
            logprobs = self._logprobs(PrefixBatch.of(rows, self._device), Sampling())
            loss = -logprobs.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        tokens = sum(len(response) for _, response in pairs)
        self._supervised.step(float(tokens))
        return total / tokens

    def onload(self) -> None:
        """Bring parameters, gradients and optimiser state onto the device. See `Residency`."""
        move(self._tensors(), self._device)

    def offload(self) -> None:
        """Move them to host memory. See `Residency`."""
        move(self._tensors(), torch.device("cpu"))

    def resident_bytes(self) -> int:
        """Bytes of parameters, gradients and optimiser state on the device."""
        return nbytes(self._tensors(), self._device)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._optimiser.tensors()
        if self._supervised is not None:
            yield from self._supervised.tensors()

    def _logprobs(self, batch: PrefixBatch, sampling: Sampling) -> Tensor:
        """Log-probs of the response tokens, float32 [R]."""
        on = self._config.autocast and quick_bfloat16(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=on):
            logits, source = self._backbone.logits(batch)
        return token_logprobs(logits, source, batch.targets, sampling)

    def _backward_waiting(self) -> PartialStats:
        """The gradient of all groups that wait, a micro-batch at a time."""
        waiting, self._waiting = self._waiting, []
        outputs = max(1, self._config.micro_batch_logits // self._vocabulary)
        parts = PartialStats()
        for batch in cut(waiting, self._config.micro_batch_tokens, outputs):
            parts += self._backward(batch)
        return parts

    def _backward(self, micro: MicroBatch) -> PartialStats:
        """The gradient of a micro-batch's summed loss."""
        sampling = micro[0].sampling
        batch = PrefixBatch.of([part.rows for part in micro], self._device)
        layout = batch.responses
        logprobs = layout.spread(self._logprobs(batch, sampling))
        mask = layout.spread(torch.ones(len(batch.targets), dtype=torch.bool, device=self._device))
        rollout = padded([part.logprobs for part in micro], layout.width, self._device)
        old = logprobs.detach() if self._config.old_logprobs == "trainer" else rollout
        advantages = torch.from_numpy(np.concatenate([part.advantages for part in micro]))
        loss = self._loss(logprobs, old, advantages.to(self._device)[:, None], mask)
        penalised = loss.loss + self._penalty(micro, logprobs)
        total, weight = reduce(penalised, mask, self._config.normalisation)
        total.backward()  # type: ignore[no-untyped-call]
        drift = kl(rollout, logprobs.detach(), "k3")
        deviation = torch.where(mask, (loss.ratio - 1).abs(), 0).max()
        return PartialStats(
            loss=float(total.detach()),
            weight=float(weight),
            clipped=int((loss.clipped & mask).sum()),
            kl=float(masked_sum(drift, mask)),
            ratio_deviation=float(deviation),
        )

    def _loss(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
        clip = self._config.clip
        if self._config.loss == "gspo":
            return gspo(new, old, advantages, mask, clip)
        if self._config.loss == "cispo":
            return cispo(new, old, advantages, clip)
        return ppo_clip(new, old, advantages, clip)

    def _penalty(self, micro: MicroBatch, logprobs: Tensor) -> Tensor:
        if not self._config.kl_coefficient:
            return logprobs.new_zeros(())
        references = [part.reference for part in micro if part.reference is not None]
        if len(references) < len(micro):
            raise ConfigError("kl_coefficient is set, but groups came without reference_logprobs")
        reference = padded(references, logprobs.shape[1], self._device)
        return self._config.kl_coefficient * kl(logprobs, reference, self._config.kl_kind)

    def _require_known_ratio(self, sampling: Sampling) -> None:
        truncated = sampling.top_k or sampling.top_p < 1
        recorded = sampling.logprobs == "processed" and truncated
        if recorded and self._config.old_logprobs == "rollout":
            raise ConfigError(
                "the rollout recorded log-probs after top-k/top-p, the trainer computes those of "
                "the full softmax: sample with logprobs=full, or train with old_logprobs=trainer"
            )


def _select_trainable(model: nn.Module, last_layers: int) -> dict[str, nn.Parameter]:
    """Freeze all but the last layers (0: freeze nothing); the parameters left, by name."""
    if last_layers:
        stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        layers = max(stacks, key=len, default=None)
        if layers is None or len(layers) < last_layers:
            count = 0 if layers is None else len(layers)
            raise ConfigError(f"trainable_layers={last_layers}, but the model has {count} layers")
        model.requires_grad_(False)
        for layer in layers[len(layers) - last_layers :]:
            layer.requires_grad_(True)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}

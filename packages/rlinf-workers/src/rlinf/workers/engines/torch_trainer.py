"""The embedded trainer: policy gradients and supervised steps over any transformers causal LM."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.kl import KlKind, kl
from rlinf.workers.algorithms.losses import (
    Clip,
    Normalisation,
    importance_weights,
    reduce,
)
from rlinf.workers.algorithms.masking import masked_sum
from rlinf.workers.algorithms.registry import (
    GROUP_ADVANTAGES,
    POLICY_LOSSES,
    AdvantageKind,
    LossKind,
)
from rlinf.workers.algorithms.shaping import DynamicSampling, Overlong
from rlinf.workers.bounds import Count, Natural, NonNegative, Positive
from rlinf.workers.engines.backbone import backbone_of
from rlinf.workers.engines.models import quick_bfloat16
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.parameters import load_state, move, nbytes, state_of
from rlinf.workers.engines.policy_batch import (
    MicroBatch,
    TrainRows,
    advantages_of,
    counted,
    cut,
    padded,
    per_token,
    shaped,
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
    """What the trainer does with a step's samples. `ALGORITHMS` has what goes together.

    Attributes:
        optimiser: AdamW's settings.
        advantage: How rewards become advantages. `gae`: groups come with those of a critic.
        loss: Which policy loss.
        clip: Its bounds; None: those of its paper.
        normalisation: What the loss is divided by; rows that are not trained on do not count,
            except for `constant`, whose missing number is `max_response_tokens`.
        max_response_tokens: The longest response allowed; 0: not known.
        overlong: Penalty of long responses, or None. Groups whose rewards are equal without it stay
            equal.
        dynamic: Sample on, in rounds, until a step has enough informative groups; None: one round.
        frozen_steps: In the first so many steps no parameter moves: a critic learns first.
        old_logprobs: The old policy of the ratio. `rollout`: as recorded when sampling. `trainer`:
            this model before the step, for one on-policy step with a rollout of other precision;
            the ratio is then 1.
        importance_cap: Weigh each token by p_trainer / p_rollout, at most this, for a rollout of
            other precision; needs `old_logprobs=trainer`. None: no weights.
        kl_coefficient: Weight of the KL penalty; groups then need `reference_logprobs`.
        kl_kind: Which estimate of it.
        max_staleness: Samples whose weights were more versions behind when they began are not
            trained on, and are counted as `stale`; None: all are. Their rewards still count for the
            advantages of their group.
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
    loss: LossKind = "ppo"
    clip: Clip | None = None
    normalisation: Normalisation = field(default_factory=Normalisation)
    max_response_tokens: Natural = 0
    overlong: Overlong | None = None
    dynamic: DynamicSampling | None = None
    frozen_steps: Natural = 0
    old_logprobs: Literal["rollout", "trainer"] = "rollout"
    importance_cap: Positive | None = None
    kl_coefficient: NonNegative = 0.0
    kl_kind: KlKind = "k2"
    max_staleness: Natural | None = None
    trainable_layers: Natural = 0
    autocast: bool = False
    min_batch_tokens: Natural = 1024
    micro_batch_tokens: Count = 16384
    micro_batch_logits: Count = 1 << 26

    def __post_init__(self) -> None:
        if self.importance_cap is not None and self.old_logprobs != "trainer":
            raise ValueError(
                "importance_cap needs old_logprobs=trainer: the ratio to the rollout's log-probs "
                "corrects for them already"
            )
        if self.advantage not in GROUP_ADVANTAGES and self.dynamic is not None:
            raise ValueError(f"dynamic sampling needs groups, advantage={self.advantage} has none")
        if self.advantage == "gae" and self.overlong is not None:
            raise ValueError("overlong shapes rewards; with advantage=gae the critic reads them")

    @property
    def divisor(self) -> Normalisation:
        """The normalisation with its constant. Raises `ConfigError` where nothing says it."""
        if self.normalisation.kind != "constant" or self.normalisation.constant:
            return self.normalisation
        return Normalisation("constant", self._limit())

    def shaped(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """The groups with the penalty of long responses, where one is set."""
        return shaped(groups, self.overlong, self._limit()) if self.overlong else groups

    def _limit(self) -> int:
        if self.max_response_tokens < 1:
            raise ConfigError("set max_response_tokens: the algorithm needs the longest response")
        return self.max_response_tokens


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
        self._normalisation = self._config.divisor
        self._parts = PartialStats()
        self._held: list[ScoredGroup] = []
        self._waiting: list[TrainRows] = []
        self._version = self._rounds = 0

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
        self._held += groups
        if self._config.advantage not in GROUP_ADVANTAGES:
            return PartialStats()  # they are decided by the whole batch, so at the end of the step
        parts = self._settle()
        if sum(rows.cost[0] for rows in self._waiting) >= self._config.min_batch_tokens:
            parts += self._backward_waiting()
        self._parts += parts
        return parts

    def end_round(self) -> bool:
        """See `TrainerEngine`; always true without dynamic sampling."""
        self._rounds += 1
        dynamic = self._config.dynamic
        return dynamic is None or not dynamic.wants_more(self._parts.informative, self._rounds)

    def _stale(self, group: ScoredGroup) -> npt.NDArray[np.bool_]:
        """Which samples are too old to be trained on, bool [n]."""
        behind = self._version - group.group.versions
        limit = self._config.max_staleness
        return np.asarray(np.zeros(len(behind), bool) if limit is None else behind > limit)

    def finish_step(self) -> StepStats:
        """Divide the gradient by the step's weight, clip it, step, and begin the next step.

        Raises `NonFiniteGradient`; the step's samples are dropped then.
        """
        parts = self._parts + self._settle()
        parts += self._backward_waiting()
        stepped = parts.rows > 0 and not self._frozen
        self._parts = PartialStats()
        self._supervised = None
        self._rounds = 0
        lr = self._optimiser.lr
        norm = self._optimiser.step(parts.weight if stepped else 0.0)
        self._version += stepped
        return StepStats(self._version, stepped, lr, norm, parts)

    def sft_step(
        self,
        pairs: Sequence[Pair],
        config: OptimiserConfig,
        written: Sequence[npt.NDArray[np.bool_]] | None = None,
    ) -> float:
        """One step of maximum likelihood on the responses, with an optimiser of its own.

        `written` says for each response which tokens count, bool [T]; None: all of them. Returns
        the mean loss of a token that counts before the step. `config` counts at the first call
        only; the optimiser is forgotten at the first policy step. Raises `ValueError` in the middle
        of a policy step.
        """
        if self._parts != PartialStats() or self._held:
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
            if written is not None:
                counts = np.concatenate(written[start : start + size])
                logprobs = logprobs[torch.from_numpy(counts).to(self._device)]
            loss = -logprobs.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        counted = written or [np.ones(len(response), bool) for _, response in pairs]
        tokens = sum(int(mask.sum()) for mask in counted)
        self._supervised.step(float(tokens))
        return total / tokens

    def save(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What decides the steps to come: tensors (not copies) and numbers, each by name.

        Raises `ValueError` in the middle of a policy step.
        """
        if self._parts != PartialStats() or self._held:
            raise ValueError("finish the policy step before saving")
        model = {f"model.{name}": tensor for name, tensor in self.state().items()}
        moments = self._optimiser.state(list(self._trainable))
        tensors = model | {f"optimiser.{name}": tensor for name, tensor in moments.items()}
        return tensors, {"version": self._version, "optimiser_calls": self._optimiser.calls}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what `save` described; a step that was begun is forgotten.

        Raises `WeightsMismatch`, with nothing changed, when they are those of another model.
        """

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        load_state(self.state(), under("model."), complete=True)
        self._optimiser.load(list(self._trainable), under("optimiser."), numbers["optimiser_calls"])
        self._version = numbers["version"]
        self._parts, self._held, self._waiting = PartialStats(), [], []
        self._supervised, self._rounds = None, 0

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

    @property
    def _frozen(self) -> bool:
        return self._optimiser.calls < self._config.frozen_steps

    def _settle(self) -> PartialStats:
        """Give the groups that are held their advantages, and queue what there is to train on."""
        groups, self._held = self._config.shaped(self._held), []
        parts = PartialStats()
        everything = self._config.kl_coefficient > 0
        advantages = advantages_of(groups, self._config.advantage)
        for group, given in zip(groups, advantages, strict=True):
            stale = self._stale(group)
            rows = train_rows(group, given, skip=stale, all_rows=everything)
            parts += counted(group, rows, self._version)
            parts += PartialStats(stale=int(stale.sum()))
            if rows is not None and not self._frozen:
                self._require_known_ratio(rows.sampling)
                self._waiting.append(rows)
        if self._normalisation.kind == "constant":
            # Samples without a gradient are samples still.
            parts = replace(parts, weight=float(parts.dropped))
        return parts

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
        mask = padded([p.mask.astype(np.float32) for p in micro], layout.width, self._device) != 0
        rollout = padded([part.logprobs for part in micro], layout.width, self._device)
        old = logprobs.detach() if self._config.old_logprobs == "trainer" else rollout
        advantages = per_token(micro, layout.width, self._device)
        loss = POLICY_LOSSES[self._config.loss](logprobs, old, advantages, mask, self._config.clip)
        cap = self._config.importance_cap
        weighed = loss.loss if cap is None else loss.loss * importance_weights(old, rollout, cap)
        penalised = weighed + self._penalty(micro, logprobs)
        total, weight = reduce(penalised, mask, self._normalisation)
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

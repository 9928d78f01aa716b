"""The embedded trainer: policy gradients and supervised steps over any transformers causal LM."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlinf.workers.algorithms.parts import BATCH_ADVANTAGES
from rlinf.workers.engines.backbone import backbone_of
from rlinf.workers.engines.layers import recompute_layers, select_trainable
from rlinf.workers.engines.lora import adapt, merged
from rlinf.workers.engines.models import in_bfloat16
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.parameters import OneDevice, load_state, state_of
from rlinf.workers.engines.policy_batch import MicroBatch, TrainRows, cut, padded
from rlinf.workers.engines.policy_step import Pair, policy_loss, settle, supervised_rows
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.reward import ScoredGroup
from rlinf.workers.roles.rollout import Sampling
from rlinf.workers.roles.trainer import PartialStats, StepStats
from rlinf.workers.team import Team

__all__ = ["TorchTrainer", "TrainerConfig", "make"]


def make(model: nn.Module, config: TrainerConfig, team: Team) -> "TorchTrainer":
    """The trainer of a group of one rank. Raises `ConfigError` for more."""
    if team.size > 1:
        raise ConfigError(
            f"trainer.engine=torch is one process, not {team.size}: set trainer.ranks=1, or "
            "trainer.engine=fsdp"
        )
    return TorchTrainer(model, config)


class TorchTrainer(OneDevice):
    """A `TrainerEngine` on one device. Not thread-safe.

    The model is in eval mode throughout: dropout would make the log-probs of the trainer differ
    from those of the rollout, and a step depend on how its batch was cut.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig | None = None) -> None:
        self._config = config or TrainerConfig()
        self._model = model
        if self._config.lora is not None:
            adapt(model, self._config.lora)
        self._backbone = backbone_of(model)
        if self._config.activation_checkpointing:
            recompute_layers(model, self._backbone)
        self._device = next(model.parameters()).device
        self._trainable = select_trainable(model, self._config.trainable_layers)
        self._optimiser = Optimiser(self._trainable.values(), self._config.optimiser)
        self._supervised: Optimiser | None = None
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        _ = self._config.divisor  # a missing constant is to be noticed now
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
        """The parameters by name, as they are now (not copies), adapters added in.

        With `trainable_only` those that learn, as they are.
        """
        own = state_of(self._model)
        if trainable_only:
            return {n: own[n] for n in self._trainable}
        return merged(own, self._config.lora)

    def accumulate(self, groups: Sequence[ScoredGroup]) -> PartialStats:
        """Add the gradient of these groups to the step's, now or, if they are few, later.

        Returns what was counted in them and what was computed by this call. Raises `ConfigError`
        when the loss needs what the groups do not have.
        """
        self._held += groups
        if self._config.advantage in BATCH_ADVANTAGES:
            return PartialStats()  # they are decided by the whole batch, so at the end of the step
        parts = self._settle()
        if sum(rows.cost[0] for rows in self._waiting) >= self._config.min_batch_tokens:
            parts += self._backward_waiting()
        self._parts += parts
        return parts

    def end_round(self) -> int:
        """See `TrainerEngine`; always 0 without dynamic sampling."""
        self._rounds += 1
        dynamic = self._config.dynamic
        return dynamic.lacking(self._parts.informative, self._rounds) if dynamic else 0

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
        stepped = norm > 0.0
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
            rows = supervised_rows(pairs[start : start + size])
            part = PrefixBatch.of(rows, self._device)
            if written is not None:
                counts = np.concatenate(written[start : start + size])
                part = part.predicting(torch.from_numpy(counts).to(self._device))
            loss = -self._logprobs(part, Sampling()).sum()
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
        model = {f"model.{name}": tensor for name, tensor in state_of(self._model).items()}
        moments = self._optimiser.state(list(self._trainable))
        tensors = model | {f"optimiser.{name}": tensor for name, tensor in moments.items()}
        return tensors, {"version": self._version, "optimiser_calls": self._optimiser.calls}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what `save` described; a step that was begun is forgotten.

        Raises `WeightsMismatch`, with nothing changed, when they are those of another model.
        """

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        load_state(state_of(self._model), under("model."), complete=True)
        self._optimiser.load(list(self._trainable), under("optimiser."), numbers["optimiser_calls"])
        self._version = numbers["version"]
        self._parts, self._held, self._waiting = PartialStats(), [], []
        self._supervised, self._rounds = None, 0

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._optimiser.tensors()
        if self._supervised is not None:
            yield from self._supervised.tensors()

    def _logprobs(self, batch: PrefixBatch, sampling: Sampling) -> Tensor:
        """Log-probs of the response tokens, float32 [R]."""
        with in_bfloat16(self._config.autocast, self._device):
            logits, source = self._backbone.logits(batch)
        return token_logprobs(logits, source, batch.targets, sampling)

    def _wanted_logprobs(self, batch: PrefixBatch, sampling: Sampling, wanted: Tensor) -> Tensor:
        """The same, 0 for tokens that are not `wanted`, bool [R]: these cost no logits."""
        found = self._logprobs(batch.predicting(wanted), sampling)
        return found.new_zeros(len(wanted)).index_put((wanted,), found)

    @property
    def _frozen(self) -> bool:
        return self._optimiser.calls < self._config.frozen_steps

    def _settle(self) -> PartialStats:
        """Give the groups that are held their advantages, and queue what there is to train on."""
        rows, parts = settle(self._held, self._config, self._version, frozen=self._frozen)
        self._held = []
        self._waiting += rows
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
        batch = PrefixBatch.of([part.rows for part in micro], self._device)
        layout, masks = batch.responses, [part.mask.astype(np.float32) for part in micro]
        wanted = layout.gather(padded(masks, layout.width, self._device) != 0)
        logprobs = self._wanted_logprobs(batch, micro[0].sampling, wanted)
        total, parts = policy_loss(micro, batch, logprobs, self._config)
        total.backward()  # type: ignore[no-untyped-call]
        return parts

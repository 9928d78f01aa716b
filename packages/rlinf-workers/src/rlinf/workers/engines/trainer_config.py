"""What a trainer is told, as plain data: algorithm, bounds of batches, the engine and its ranks."""

from dataclasses import dataclass, field
from typing import Literal

from rlinf.workers.algorithms.parts import (
    BATCH_ADVANTAGES,
    AdvantageKind,
    Clip,
    DynamicSampling,
    KlKind,
    LossKind,
    Normalisation,
    Overlong,
)
from rlinf.workers.bounds import Count, Natural, NonNegative, Positive
from rlinf.workers.engines.optimiser_config import OptimiserConfig
from rlinf.workers.errors import ConfigError

__all__ = ["Lora", "Parallel", "TrainerConfig"]

ATTENTION_AND_MLP = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many ranks share one copy of the model; copies take different samples.

    Attributes:
        tensor: Ranks that share every matrix (tensor parallelism).
        pipeline: Ranks that share the layers (pipeline parallelism).
    """

    tensor: Count = 1
    pipeline: Count = 1


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters.

    Attributes:
        rank: Width of the thin matrices.
        alpha: Their product is added alpha / rank times.
        targets: Names of the modules that get them; by default all of Llama's and Qwen's layers.
    """

    rank: Count = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ATTENTION_AND_MLP


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
            the ratio is then 1. `inference`: the same, worked out by an inference worker on its
            own devices, which groups then have in `old_logprobs`.
        importance_cap: Weigh each token by p_trainer / p_rollout, at most this, for a rollout of
            other precision; not with `old_logprobs=rollout`. None: no weights.
        kl_coefficient: Weight of the KL penalty against a reference policy, whose
            `reference_logprobs` groups then need.
        kl_kind: Which estimate of it.
        max_staleness: Samples whose weights were more versions behind when they began are not
            trained on, and are counted as `stale`; None: all are. Their rewards still count for the
            advantages of their group.
        trainable_layers: Train only the last so many layers; 0: everything.
        autocast: Compute in bfloat16 where torch deems it safe; parameters, gradients and moments
            stay as they are. true: where the device is quick at it; always: anywhere.
        min_batch_tokens: Groups wait until they have so many tokens together, or for the end of the
            step: small batches cost several times as much a token as large ones.
        micro_batch_tokens: Bound on the tokens that go through the model at once.
        micro_batch_logits: Bound on the logits (predicted tokens times vocabulary) at once.
        engine: torch: one process. fsdp: every parameter in slices, one a rank. megatron: layers
            and matrices split among ranks. Or the name of a plug-in.
        ranks: Workers of the trainer, a process each.
        parallel: How megatron splits the model among them.
        lora: Train low-rank adapters in place of the parameters; None: the parameters.
        activation_checkpointing: Compute each layer again for its gradient in place of keeping what
            is in it: less memory, about a third more work.
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
    old_logprobs: Literal["rollout", "trainer", "inference"] = "rollout"
    importance_cap: Positive | None = None
    kl_coefficient: NonNegative = 0.0
    kl_kind: KlKind = "k2"
    max_staleness: Natural | None = None
    trainable_layers: Natural = 0
    autocast: Literal[False, True, "always"] = False
    min_batch_tokens: Natural = 1024
    micro_batch_tokens: Count = 16384
    micro_batch_logits: Count = 1 << 26
    engine: str = "torch"
    ranks: Count = 1
    parallel: Parallel = field(default_factory=Parallel)
    lora: Lora | None = None
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.lora is not None and self.trainable_layers:
            raise ValueError("lora trains adapters, trainable_layers parameters: set one of them")
        if self.importance_cap is not None and self.old_logprobs == "rollout":
            raise ValueError(
                "importance_cap needs old_logprobs=trainer or inference: the ratio to what the "
                "rollout recorded corrects for it already"
            )
        if self.advantage in BATCH_ADVANTAGES and self.dynamic is not None:
            raise ValueError(f"dynamic sampling needs groups, advantage={self.advantage} has none")
        if self.advantage == "gae" and self.overlong is not None:
            raise ValueError("overlong shapes rewards; with advantage=gae the critic reads them")

    @property
    def divisor(self) -> Normalisation:
        """The normalisation with its constant. Raises `ConfigError` where nothing says it."""
        if self.normalisation.kind != "constant" or self.normalisation.constant:
            return self.normalisation
        return Normalisation("constant", self.limit)

    @property
    def limit(self) -> int:
        """The longest response. Raises `ConfigError` where nothing says it."""
        if self.max_response_tokens < 1:
            raise ConfigError("set max_response_tokens: the algorithm needs the longest response")
        return self.max_response_tokens

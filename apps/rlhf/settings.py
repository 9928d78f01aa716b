"""The keys of this app's configuration, and what follows from them. Needs no torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tasks import CharTokenizer, PretrainedTokenizer, Task, TaskConfig, Tokenizer

from rlinf.channel import ChannelConfig
from rlinf.workers import PlanningConfig
from rlinf.workers.algorithms.registry import ALGORITHMS
from rlinf.workers.bounds import Count, Natural, NonNegative, Share
from rlinf.workers.course import Choice
from rlinf.workers.engines.critic_config import CriticConfig
from rlinf.workers.engines.generate_config import GenerateConfig
from rlinf.workers.engines.model_spec import ModelSpec
from rlinf.workers.engines.optimiser_config import OptimiserConfig
from rlinf.workers.engines.trainer_config import Parallel, TrainerConfig
from rlinf.workers.roles import GenerationRequest, RewardEngine, Sampling
from rlinf.workers.run_config import RunConfig

__all__ = ["CHOICES", "CONFIG", "EvalConfig", "RlhfConfig", "RolloutConfig", "SftConfig"]

Dtype = Literal["float32", "bfloat16", "auto"]
CONFIG = Path(__file__).with_name("config.yaml")
CHOICES = {"algorithm": {name: {"trainer": a.settings()} for name, a in ALGORITHMS.items()}}
"""What `algorithm=...` implies; each part can still be set, as in `trainer.clip.high=0.3`."""


@dataclass(frozen=True, slots=True)
class SftConfig:
    """The supervised start, which makes a model that is right now and then.

    Attributes:
        steps: At most so many steps; 0: none.
        batch: Demonstrations a step.
        stop_at: Stop when so many of the sampled held-out answers are right.
        every: Steps between two looks at that.
        samples: Sampled answers for each held-out prompt.
        optimiser: Its own AdamW.
    """

    steps: Natural = 400
    batch: Count = 256
    stop_at: Share = 0.3
    every: Count = 10
    samples: Count = 4
    optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(
            lr=1e-3, warmup_steps=20, beta2=0.98, weight_decay=0.01
        )
    )


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What is sampled in a step.

    Attributes:
        prompts: Prompts a step.
        samples: Responses for each.
        max_new_tokens: Bound on a response.
        temperature: Of the sampling.
        dtype: In which the rollout computes; auto: bfloat16 where the device is quick at it.
        engine: The engine and its limits.
    """

    prompts: Count = 32
    samples: Count = 16
    max_new_tokens: Count = 5
    temperature: NonNegative = 1.0
    dtype: Dtype = "float32"
    engine: GenerateConfig = field(default_factory=GenerateConfig)


@dataclass(frozen=True, slots=True)
class ChannelsConfig:
    """Channels of the flow whose settings matter here.

    Attributes:
        experience_queue: What a step's samples reach the learners by: `scored`, and with a critic
            `valued` behind it. Its `buffer_size` has to hold those of a whole step.
    """

    experience_queue: ChannelConfig = field(default_factory=ChannelConfig)


@dataclass(frozen=True, slots=True)
class SchedulingConfig(PlanningConfig):
    """`PlanningConfig`, and what a step is.

    Attributes:
        batch_size: Prompts a step; 0: as `rollout.prompts` says.
        sync_interval: Steps between two times that the rollout is given the weights. With 1 every
            sample is from the newest; with n the oldest are n - 1 steps behind (`staleness`), and
            their ratio to the policy that they came from is what the clip bounds. A run that is
            resumed, or repeats steps, begins with a sync.
        max_staleness: Asynchronous training: generation is so many steps ahead of it and goes on
            beside it. New weights are given to it at once; samples under way go on with them. None
            that is trained on began with weights which were more steps behind (with a
            `sync_interval` of n, n - 1 more). 0: each step waits for its samples.
    """

    batch_size: Natural = 0
    sync_interval: Count = 1
    max_staleness: Natural = 0


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """How a run is judged on held-out prompts.

    Attributes:
        every: Steps between two evaluations, each after the step; 0: none.
        samples: Sampled answers for each held-out prompt.
    """

    every: Natural = 0
    samples: Count = 4


@dataclass(frozen=True, slots=True)
class RlhfConfig(RunConfig):
    """Everything about a run.

    Attributes:
        model: A preset of config.yaml, or the path of a transformers model folder.
        algorithm: ppo (with a critic), grpo, dr_grpo, dapo, rloo, reinforce++, gspo or cispo.
    """

    model: str = "tiny"
    algorithm: str = "grpo"
    task: TaskConfig = field(default_factory=TaskConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    channels: ChannelsConfig = field(default_factory=ChannelsConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        Choice.of(self.plan)
        for role, ranks in (("trainer", self.trainer.ranks), ("critic", self.critic.ranks)):
            if self.launcher == "inline" and ranks > 1:
                raise ValueError(f"{role}.ranks={ranks} needs launcher=ray")
        engine, split = self.trainer.engine, self.trainer.parallel != Parallel()
        if engine in ("torch", "fsdp") and split:
            raise ValueError(
                f"trainer.parallel is how trainer.engine=megatron splits a model; {engine} does not"
            )
        at_once = self.trainer.old_logprobs != "rollout" and self.trainer.importance_cap is None
        if self.staleness and at_once:
            raise ValueError(
                f"samples are up to {self.staleness} steps old (scheduling), for which "
                f"old_logprobs={self.trainer.old_logprobs} does not correct: set "
                "old_logprobs=rollout, or importance_cap"
            )
        if self.scheduling.max_staleness and self.plan in ("temporal", "auto"):
            raise ValueError(
                f"with scheduling.max_staleness={self.scheduling.max_staleness} generation goes on "
                f"beside training, which plan={self.plan} does not allow for: plan=spatial, or the "
                "path of a saved plan"
            )

    @property
    def staleness(self) -> int:
        """Steps that the weights of a sample are behind at most."""
        return self.scheduling.max_staleness + self.scheduling.sync_interval - 1

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.trainer.advantage == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether the policy is held to the one that it was at first."""
        return self.trainer.kl_coefficient > 0

    @property
    def has_inference(self) -> bool:
        """Whether the old policy's log-probs are worked out by a worker of their own."""
        return self.trainer.old_logprobs == "inference"

    @property
    def experience(self) -> tuple[str, ...]:
        """The channels from the reward to the trainer, in the order in which samples pass them."""
        compared = ["compared"] * self.has_reference + ["inferred"] * self.has_inference
        return ("scored", *compared, *["valued"] * self.has_critic)

    @property
    def prompts(self) -> int:
        """Prompts a step."""
        return self.scheduling.batch_size or self.rollout.prompts

    def syncs(self, step: int) -> bool:
        """Whether the rollout is given the weights before this step, the first of which is 1."""
        return (step - 1) % self.scheduling.sync_interval == 0

    def requests(
        self, task: Task, step: int, round: int, count: int | None = None
    ) -> list[GenerationRequest]:
        """What is sampled in a round of a step; the same for every run with the same seed.

        `count`: of prompts; None: as many as a step has.
        """
        sizes, again = self.rollout, f"+{round}" * (round > 0)
        items = task.prompts(
            self.seed * 1_000_003 + step + 1_000_033 * round, count or self.prompts
        )
        return task.requests(
            f"{step}{again}", items, self.sampling(task), sizes.samples, sizes.max_new_tokens
        )

    def trainer_config(self) -> TrainerConfig:
        """The trainer's configuration with what the rollout's says about lengths and groups."""
        dynamic, sizes = self.trainer.dynamic, self.rollout
        if dynamic is not None and not dynamic.groups:
            dynamic = replace(dynamic, groups=self.prompts)
        longest = self.trainer.max_response_tokens or sizes.max_new_tokens
        bound = self.trainer.max_staleness
        if bound is None and self.scheduling.max_staleness:
            bound = self.staleness
        return replace(
            self.trainer, dynamic=dynamic, max_response_tokens=longest, max_staleness=bound
        )

    def model_spec(self, dtype: Dtype = "float32") -> ModelSpec:
        """The model to build."""
        if self.model == "tiny":
            return ModelSpec("tiny", seed=self.seed, vocab_size=CharTokenizer.size, dtype=dtype)
        if self.model == "smollm2":
            return ModelSpec("smollm2", dtype=dtype)
        return ModelSpec("folder", path=Path(self.model), dtype=dtype)

    def make_task(self) -> Task:
        """The task with the model's tokenizer."""
        tokenizer: Tokenizer = CharTokenizer()
        if self.model != "tiny":
            from rlinf.workers.engines.models import load_tokenizer

            tokenizer = PretrainedTokenizer(load_tokenizer(self.model_spec()))
        return Task(self.task, tokenizer)

    def make_reward(self) -> RewardEngine:
        """What judges responses; called where the reward runs."""
        return self.make_task().reward()

    def sampling(self, task: Task) -> Sampling:
        """How responses are drawn."""
        return Sampling(
            temperature=self.rollout.temperature,
            stop_ids=task.tokenizer.stop_ids,
            banned_ids=task.tokenizer.banned_ids,
            seed=self.seed,
        )

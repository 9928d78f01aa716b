"""The keys of this app's configuration, and what follows from them. Needs no torch."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from corpus import documents
from task import QuestionConfig, SearchTask, language_of, tiny_codec

from rlinf.workers.algorithms.registry import ALGORITHMS
from rlinf.workers.bounds import Count, Natural, NonNegative
from rlinf.workers.engines.episode_config import EpisodeConfig
from rlinf.workers.engines.model_spec import ModelSpec
from rlinf.workers.engines.optimiser_config import OptimiserConfig
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.episodes.codec import TextCodec
from rlinf.workers.episodes.episode import Language
from rlinf.workers.episodes.template import generation_prompt
from rlinf.workers.roles import GenerationRequest, RewardEngine, Sampling, Tool
from rlinf.workers.run_config import RunConfig
from rlinf.workers.tool_hosts import ToolAccess
from rlinf.workers.tools.bm25 import Bm25Index
from rlinf.workers.tools.box import ToolConfig
from rlinf.workers.tools.documents import Shown
from rlinf.workers.tools.http_search import HttpRetriever
from rlinf.workers.tools.search import SearchConfig as RetrievalConfig
from rlinf.workers.tools.search import SearchTool

__all__ = ["CHOICES", "CONFIG", "SearchConfig"]

Dtype = Literal["float32", "bfloat16", "auto"]
CONFIG = Path(__file__).with_name("config.yaml")
CHOICES = {
    "algorithm": {
        name: {"trainer": a.settings()} for name, a in ALGORITHMS.items() if name != "ppo"
    }
}
"""What `algorithm=...` implies; each part can still be set, as in `trainer.clip.high=0.3`."""
INSTRUCTION = """\
Answer the question. First think between <think> and </think>. To look something up, write a query \
between <search> and </search>: what is found comes back between <information> and </information>. \
Search as often as you need. Then write the answer between <answer> and </answer>, without any \
explanation, for example <answer> Paris </answer>. Question: """


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Sizes of `model=tiny`.

    Attributes:
        vocab_size: Tokens of its tokenizer.
        hidden_size: Width.
        layers: Depth.
    """

    vocab_size: Count = 3072
    hidden_size: Count = 96
    layers: Count = 3


@dataclass(frozen=True, slots=True)
class SftConfig:
    """The supervised start.

    Attributes:
        steps: How many; 0: none.
        batch: Demonstrations a step.
        threads: To compute with.
        optimiser: Its own AdamW.
    """

    steps: Natural = 900
    batch: Count = 64
    threads: Count = 2
    optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(
            lr=3e-3, warmup_steps=30, decay_steps=900, beta2=0.98, weight_decay=0.01
        )
    )


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """What is sampled in a step.

    Attributes:
        prompts: Questions a step.
        samples: Episodes for each.
        max_new_tokens: Bound on the tokens that the model writes in an episode.
        temperature: Of the sampling.
        dtype: In which the rollout computes; auto: bfloat16 where the device is quick at it.
        episodes: Limits of an episode and of the engine.
    """

    prompts: Count = 16
    samples: Count = 8
    max_new_tokens: Count = 64
    temperature: NonNegative = 1.0
    dtype: Dtype = "float32"
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """How a run is judged on held-out questions.

    Attributes:
        every: Steps between two evaluations, each before the step; 0: none.
        samples: Episodes for each question.
    """

    every: Natural = 10
    samples: Count = 4


@dataclass(frozen=True, slots=True)
class SearchConfig(RunConfig):
    """Everything about a run.

    Attributes:
        model: A preset of config.yaml, or the path of a transformers model folder.
        algorithm: grpo, dr_grpo, dapo, rloo, reinforce++, gspo or cispo.
        search: false: nothing can be searched for, and no demonstration does: a control.
        retriever: Url of a retrieval server; empty: a search engine of our own.
        tools: Deadline and tries of a search.
        retrieval: What a search shows.
    """

    model: str = "tiny"
    algorithm: str = "grpo"
    search: bool = True
    retriever: str = ""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    questions: QuestionConfig = field(default_factory=QuestionConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolConfig = field(default_factory=ToolConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)  # slots: no super() without arguments
        if self.retriever:
            HttpRetriever(self.retriever)
        if self.trainer.kl_coefficient:
            raise ValueError("trainer.kl_coefficient needs a reference policy, which is not here")

    def requests(
        self, task: SearchTask, step: int, round: int, count: int | None = None
    ) -> list[GenerationRequest]:
        """What is sampled in a round of a step; the same for every run with the same seed.

        `count`: of questions; None: as many as a step has.
        """
        sizes, again = self.rollout, f"+{round}" * (round > 0)
        items = task.prompts(
            self.seed * 1_000_003 + step + 1_000_033 * round, count or sizes.prompts
        )
        label = f"{step}{again}"
        return task.requests(label, items, self.sampling(), sizes.samples, sizes.max_new_tokens)

    def trainer_config(self) -> TrainerConfig:
        """The trainer's configuration with what the rollout's says about lengths and groups."""
        dynamic, sizes = self.trainer.dynamic, self.rollout
        if dynamic is not None and not dynamic.groups:
            dynamic = replace(dynamic, groups=sizes.prompts)
        longest = self.trainer.max_response_tokens or sizes.max_new_tokens
        return replace(self.trainer, dynamic=dynamic, max_response_tokens=longest)

    def episode_config(self) -> EpisodeConfig:
        """What an episode may use up."""
        episodes = self.rollout.episodes
        limits = episodes.limits if self.search else replace(episodes.limits, calls=0)
        return replace(episodes, limits=limits)

    def tool_access(self, worker: str) -> ToolAccess:
        """Who searches."""
        return ToolAccess({"search": worker}, self.tools)

    def model_spec(self, dtype: Dtype = "float32") -> ModelSpec:
        """The model to build."""
        if self.model == "tiny":
            return ModelSpec(
                "tiny",
                seed=self.seed,
                vocab_size=self.tiny.vocab_size,
                hidden_size=self.tiny.hidden_size,
                layers=self.tiny.layers,
                max_positions=self.rollout.episodes.limits.tokens,
            )
        if self.model == "smollm2":
            return ModelSpec("smollm2", dtype=dtype)
        return ModelSpec("folder", path=Path(self.model), dtype=dtype)

    def make_codec(self) -> TextCodec:
        """The model's tokenizer."""
        if self.model == "tiny":
            return _tiny_codec(self.tiny.vocab_size)
        return _codec(self.model_spec())

    def make_language(self) -> Language:
        """How turns are read; called where the rollout runs."""
        return language_of(self.make_codec())

    def make_task(self) -> SearchTask:
        """Questions, with the model's tokenizer."""
        codec = self.make_codec()
        questions = self.questions if self.search else replace(self.questions, search_share=0.0)
        return SearchTask(questions, codec, self._encode_prompt, Shown(self.retrieval.words))

    def make_reward(self) -> RewardEngine:
        """What judges episodes; called where the reward runs."""
        return self.make_task().reward()

    def make_tool(self) -> Tool:
        """What searches; called where the tool runs."""
        if self.retriever:
            return SearchTool(HttpRetriever(self.retriever), self.retrieval)
        return SearchTool(Bm25Index(documents()), self.retrieval)

    def sampling(self) -> Sampling:
        """How turns are drawn."""
        codec = self.make_codec()
        ends, pad = ("<end>", "<|im_end|>", "<|endoftext|>"), codec.token("<pad>")
        return Sampling(
            temperature=self.rollout.temperature,
            stop_ids=tuple(i for i in map(codec.token, ends) if i is not None),
            banned_ids=() if pad is None else (pad,),
            seed=self.seed,
        )

    def _encode_prompt(self, question: str) -> list[int]:
        if self.model == "tiny":
            return self.make_codec().encode(question)
        tokenizer = _tokenizer(self.model_spec())
        messages = [{"role": "user", "content": INSTRUCTION + question}]
        return self.make_codec().encode(generation_prompt(tokenizer, messages))


@cache
def _tiny_codec(size: int) -> TextCodec:
    return tiny_codec(size)


@cache
def _tokenizer(spec: ModelSpec) -> Any:
    from rlinf.workers.engines.models import load_tokenizer

    return load_tokenizer(spec)


@cache
def _codec(spec: ModelSpec) -> TextCodec:
    return TextCodec(_tokenizer(spec).backend_tokenizer.to_str())

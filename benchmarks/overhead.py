"""What the framework costs: an iteration of the tiny RLHF run against the same work in one loop.

The floor calls the same engines one after another: generate, score, learn, copy the weights. Then
the same calls as three actors of Ray, which pass one another what they made, with nothing between
them. The others are the app's program, in one process and on Ray, everything in turn. Each has
processes of its own, does several iterations a turn, as a run does, and begins with a model that is
right now and then: one that never is has nothing to learn from.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "apps" / "rlhf"))

import torch
from actor import Actor
from harness import Apart, race, show
from settings import RlhfConfig, SftConfig
from torch import Tensor

from rlinf.workers import Cluster, FlowPlanner, wait_all
from rlinf.workers.engines.models import build_model
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.hosts import RewardWorker, RolloutWorker
from rlinf.workers.roles import GenerationRequest, Group, ScoredGroup

Step = Callable[[], object]
EACH = 8
"""Iterations a turn."""


@contextmanager
def plain(config: RlhfConfig) -> Iterator[Step]:
    """The computation alone."""
    trainer, rollout, reward = Learning(config), Sampling(config), config.make_reward()
    ask, numbers = asking(config), itertools.count(1)

    def step() -> object:
        groups = rollout.generate(trainer.weights(), ask(next(numbers)))
        return trainer.learn(reward.score(groups))

    yield lambda: [step() for _ in range(EACH)]


@contextmanager
def actors(config: RlhfConfig) -> Iterator[Step]:
    """The computation, each part of it an actor of Ray."""
    import ray

    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    trainer = ray.remote(Learning).remote(config)
    rollout = ray.remote(Sampling).remote(config)
    reward = ray.remote(Judging).remote(config)
    ask, numbers = asking(config), itertools.count(1)

    def step() -> object:
        groups = rollout.generate.remote(trainer.weights.remote(), ask(next(numbers)))
        return ray.get(trainer.learn.remote(reward.score.remote(groups)), timeout=60)

    try:
        yield lambda: [step() for _ in range(EACH)]
    finally:
        ray.shutdown()


class Learning:
    """The trainer's part."""

    def __init__(self, config: RlhfConfig) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._engine = TorchTrainer(build_model(config.model_spec()), config.trainer)
        batches = config.make_task().demonstrations(config.seed, config.sft.batch)
        for _ in range(config.sft.steps):
            self._engine.sft_step(next(batches), config.sft.optimiser)

    def weights(self) -> tuple[Mapping[str, Tensor], int]:
        """As they are now, and their version."""
        return self._engine.state(), self._engine.version

    def learn(self, scored: list[ScoredGroup]) -> object:
        """One step."""
        self._engine.accumulate(scored)
        return self._engine.finish_step()


class Sampling:
    """The rollout's part."""

    def __init__(self, config: RlhfConfig) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        model = build_model(config.model_spec(), weights=False)
        self._engine = TorchGenerate(model, config.rollout.engine)

    def generate(
        self, weights: tuple[Mapping[str, Tensor], int], requests: list[GenerationRequest]
    ) -> list[Group]:
        """One group a request, drawn with these weights."""
        self._engine.load_state(*weights)
        return list(self._engine.generate(requests))


class Judging:
    """The reward's part."""

    def __init__(self, config: RlhfConfig) -> None:
        self._engine = config.make_reward()

    def score(self, groups: list[Group]) -> list[ScoredGroup]:
        """One scored group a group."""
        return self._engine.score(groups)


def asking(config: RlhfConfig) -> Callable[[int], list[GenerationRequest]]:
    """What the app asks for, by the number of the step."""
    task, sizes = config.make_task(), config.rollout
    sampling = config.sampling(task)

    def ask(number: int) -> list[GenerationRequest]:
        items = task.prompts(config.seed * 1_000_003 + number, sizes.prompts)
        return task.requests(f"{number}", items, sampling, sizes.samples, sizes.max_new_tokens)

    return ask


@contextmanager
def framework(config: RlhfConfig, launcher: str) -> Iterator[Step]:
    """The same as the app does it, one iteration a call."""
    with Cluster(launcher=launcher) as cluster:
        step = iteration(config, cluster)
        yield lambda: [step() for _ in range(EACH)]


def iteration(config: RlhfConfig, cluster: Cluster) -> Step:
    """The program of `framework`, one iteration a call."""
    trainer = Actor.group(cluster, config.model_spec(), config.trainer, name="trainer").launch()
    rollout = RolloutWorker.group(
        cluster, config.model_spec(), config.rollout.engine, "trainer/0", name="rollout"
    ).launch()
    reward = RewardWorker.group(cluster, config.make_reward, name="reward").launch()
    trainer.warm_up(config).result(None)

    ask = asking(config)

    def run() -> object:
        for step in FlowPlanner(cluster, "temporal").steps(itertools.count(1)):
            [version] = trainer.publish().result(None)
            loading = rollout.load_weights(version)
            prompts, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
            prompts.put_many(ask(step))
            prompts.close()
            yield wait_all(
                [
                    loading,
                    rollout.generate(prompts, samples),
                    reward.score(samples, scored),
                    trainer.train(scored),
                ]
            )

    iterations = run()
    return lambda: next(iterations)


def measure(quick: bool) -> dict[str, object]:
    """Seconds an iteration, in four ways."""
    # As many demonstrations for each: no look at how well it does ends them early.
    config = RlhfConfig(sft=SftConfig(steps=150, every=1000))
    contestants: dict[str, tuple[object, ...]] = {
        "one loop": (plain, config),
        "three actors of Ray": (actors, config),
        "rlinf, in one process": (framework, config, "inline"),
        "rlinf, on Ray": (framework, config, "ray"),
    }
    with ExitStack() as ending:
        runners = {n: ending.enter_context(closing(Apart(*c))) for n, c in contestants.items()}
        asks = {name: runner.ask for name, runner in runners.items()}
        samples = race(asks, 5 if quick else 20, warmup=1, patience_s=20 if quick else 90)
    table = show("one iteration of the tiny model", samples, "one loop", each=EACH)
    return {"iteration": table}

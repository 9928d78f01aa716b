"""What the framework costs: an iteration of the tiny RLHF run against the same work in one loop.

The floor calls the same engines one after another: generate, score, learn, copy the weights. The
others are the app's program, in one process and on Ray, everything in turn. Each has processes of
its own, does several iterations a turn, as a run does, and begins with a model that is right now
and then: one that never is has nothing to learn from.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "apps" / "rlhf"))

from actor import Actor
from harness import Apart, race, show
from settings import RlhfConfig, SftConfig

from rlinf.workers import Cluster, FlowPlanner, wait_all
from rlinf.workers.engines.models import build_model
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.hosts import RewardWorker, RolloutWorker

Step = Callable[[], object]
EACH = 8
"""Iterations a turn."""


@contextmanager
def plain(config: RlhfConfig) -> Iterator[Step]:
    """The computation alone."""
    task, sizes = config.make_task(), config.rollout
    sampling, reward = config.sampling(task), config.make_reward()
    trainer = TorchTrainer(build_model(config.model_spec()), config.trainer)
    rollout = TorchGenerate(build_model(config.model_spec(), weights=False), sizes.engine)
    batches = task.demonstrations(config.seed, config.sft.batch)
    for _ in range(config.sft.steps):
        trainer.sft_step(next(batches), config.sft.optimiser)
    number = 0

    def step() -> object:
        nonlocal number
        number += 1
        rollout.load_state(trainer.state(), trainer.version)
        items = task.prompts(config.seed * 1_000_003 + number, sizes.prompts)
        asked = task.requests(f"{number}", items, sampling, sizes.samples, sizes.max_new_tokens)
        trainer.accumulate(reward.score(list(rollout.generate(asked))))
        return trainer.finish_step()

    yield lambda: [step() for _ in range(EACH)]


@contextmanager
def framework(config: RlhfConfig, launcher: str) -> Iterator[Step]:
    """The same as the app does it, one iteration a call."""
    with Cluster(launcher=launcher) as cluster:
        step = iteration(config, cluster)
        yield lambda: [step() for _ in range(EACH)]


def iteration(config: RlhfConfig, cluster: Cluster) -> Step:
    """The program of `framework`, one iteration a call."""
    task, sizes = config.make_task(), config.rollout
    sampling = config.sampling(task)
    trainer = Actor.group(cluster, config.model_spec(), config.trainer, name="trainer").launch()
    rollout = RolloutWorker.group(
        cluster, config.model_spec(), sizes.engine, "trainer/0", name="rollout"
    ).launch()
    reward = RewardWorker.group(cluster, config.make_reward, name="reward").launch()
    trainer.warm_up(config).result(None)

    def run() -> object:
        numbers = iter(range(1, 1_000_000))
        for step in FlowPlanner(cluster, "temporal").steps(numbers):
            [version] = trainer.publish().result(None)
            loading = rollout.load_weights(version)
            prompts, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
            items = task.prompts(config.seed * 1_000_003 + step, sizes.prompts)
            prompts.put_many(
                task.requests(f"{step}", items, sampling, sizes.samples, sizes.max_new_tokens)
            )
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
    """Seconds an iteration, in three ways."""
    # As many demonstrations for each: no look at how well it does ends them early.
    config = RlhfConfig(sft=SftConfig(steps=150, every=1000))
    contestants: dict[str, tuple[object, ...]] = {
        "one loop": (plain, config),
        "rlinf, in one process": (framework, config, "inline"),
        "rlinf, on Ray": (framework, config, "ray"),
    }
    with ExitStack() as ending:
        runners = {n: ending.enter_context(closing(Apart(*c))) for n, c in contestants.items()}
        asks = {name: runner.ask for name, runner in runners.items()}
        samples = race(asks, 5 if quick else 20, warmup=1, patience_s=20 if quick else 90)
    table = show("one iteration of the tiny model", samples, "one loop", each=EACH)
    return {"iteration": table}

"""GRPO on verifiable tasks: sample answers, score them, learn from them, publish the weights.

hatch run rlhf                       # a tiny model learns to sort digits, on a Ray cluster
hatch run rlhf plan=auto             # profiles itself and finds the best plan
hatch run rlhf launcher=inline       # the same program in one process, for pdb
hatch run rlhf model=smollm2         # a real model of 135 M parameters learns to add
"""

import sys

from actor import Actor
from settings import CONFIG, RlhfConfig

from rlinf.workers import Cluster, FlowPlanner, main_guard, wait_all
from rlinf.workers.hosts import RewardWorker, RolloutWorker
from rlinf.workers.run import Run


def train(config: RlhfConfig) -> None:
    """The whole flow. Every call on a group is asynchronous; `wait_all` is the only barrier."""
    task = config.make_task()
    sampling, sizes = config.sampling(task), config.rollout
    with (
        Run(config.folder or Run.default_folder("rlhf")) as run,
        Cluster(config.cluster, config.launcher, comm=config.communication) as cluster,
    ):
        actor = Actor.group(cluster, config.model_spec(), config.trainer, name="trainer")
        trainer = actor.launch()
        rollout = RolloutWorker.group(
            cluster, config.model_spec(sizes.dtype), sizes.engine, "trainer/0", name="rollout"
        ).launch()
        reward = RewardWorker.group(cluster, config.make_reward, name="reward").launch()
        planner = FlowPlanner(cluster, config.plan, config.scheduling, run.planned)
        run.say("starting the workers")
        trainer.warm_up(config).result(None)

        for step in planner.steps(run.steps(config.steps)):
            [version] = trainer.publish().result(None)
            rollout.load_weights(version).result(None)
            prompts, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
            items = task.prompts(config.seed * 1_000_003 + step, sizes.prompts)
            prompts.put_many(
                task.requests(f"{step}", items, sampling, sizes.samples, sizes.max_new_tokens)
            )
            prompts.close()
            _, _, [report] = wait_all(
                [
                    rollout.generate(prompts, samples),
                    reward.score(samples, scored),
                    trainer.train(scored),
                ]
            )
            run.record(step, report.result.metrics())
        run.finish()


if __name__ == "__main__":
    sys.exit(main_guard(train, RlhfConfig, CONFIG))

"""RL on verifiable tasks: sample answers, score them, learn from them, publish the weights.

hatch run rlhf                       # a tiny model learns to sort digits, on a Ray cluster
hatch run rlhf algorithm=ppo         # with a critic; or dapo, rloo, reinforce++, gspo, dr_grpo
hatch run rlhf plan=auto             # profiles itself and finds the best plan
hatch run rlhf launcher=inline       # the same program in one process, for pdb
hatch run rlhf model=smollm2         # a real model of 135 M parameters learns to add
hatch run rlhf trainer.engine=fsdp trainer.ranks=2    # the trainer on two processes
"""

import itertools
import sys

from actor import Actor
from evaluation import evaluate
from settings import CHOICES, CONFIG, RlhfConfig

from rlinf.workers import FlowPlanner, WorkerGroup, main_guard, wait_all
from rlinf.workers.checkpoint import Checkpoints
from rlinf.workers.hosts import CriticWorker, RewardWorker, RolloutWorker
from rlinf.workers.program import described, run_folder
from rlinf.workers.recovery import Recovery
from rlinf.workers.run import Run


def train(config: RlhfConfig) -> None:
    """The whole flow. Every call on a group is asynchronous; `wait_all` is the only barrier."""
    task, sizes = config.make_task(), config.rollout
    folder, origin = run_folder("rlhf", config.folder, config.resume)
    with (
        Run(folder) as run,
        config.open_cluster(folder) as cluster,
    ):
        learning = config.trainer_config()
        actor = Actor.group(
            cluster, config.model_spec(), learning, count=learning.ranks, name="trainer"
        )
        trainer = actor.launch()
        rollout = RolloutWorker.group(
            cluster, config.model_spec(sizes.dtype), sizes.engine, "trainer/0", name="rollout"
        ).launch()
        reward = RewardWorker.group(cluster, config.make_reward, name="reward").launch()
        critic = None
        if config.has_critic:
            critic = CriticWorker.group(
                cluster, config.model_spec(), config.critic, "trainer/0", name="critic"
            ).launch()

        def begin() -> None:
            trainer.warm_up(config).result(None)
            if critic is not None:
                sync(trainer, critic)

        planner = FlowPlanner(cluster, config.plan, config.scheduling, run.planned)
        run.say("starting the workers")
        checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint, origin, lambda: described(config, run.plan)
        )
        learners = [trainer] if critic is None else [trainer, critic]
        recovery = Recovery(cluster, learners, checkpoints, begin, run)
        queue, due = config.channels.experience_queue, True
        for attempt in planner.steps(recovery.steps(config.steps)):
            with attempt as step:
                if due or config.syncs(step):
                    sync(trainer, rollout)
                for round in itertools.count():  # more than one where dynamic sampling wants them
                    prompts, samples = cluster.channels(step, "prompts", "samples")
                    scored = cluster.channels(step, *config.experience, config=queue)
                    prompts.put_many(config.requests(task, step, round))
                    prompts.close()
                    stages = [rollout.generate(prompts, samples), reward.score(samples, scored[0])]
                    stages += [critic.estimate(*scored)] if critic is not None else []
                    *_, [judged], [report, *_] = wait_all([*stages, trainer.train(scored[-1])])
                    if report.result is not None:
                        break
                metrics = report.result.metrics()
                if critic is not None:
                    metrics |= judged.result.metrics()
                if config.eval.every and step % config.eval.every == 0:
                    sync(trainer, rollout)
                    rewards = evaluate(cluster, (rollout, reward), task, config, step)
                    metrics["eval_reward"] = rewards
                run.record(step, metrics)
            due = attempt.failed
        run.finish()


def sync(trainer: WorkerGroup, group: WorkerGroup) -> None:
    """Bring the trainer's weights, as they are now, to `group`."""
    [version, *_] = trainer.publish().result(None)
    group.load_weights(version).result(None)


if __name__ == "__main__":
    sys.exit(main_guard(train, RlhfConfig, CONFIG, choices=CHOICES))

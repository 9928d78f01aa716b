"""RL on verifiable tasks: sample answers, score them, learn from them, publish the weights.

hatch run rlhf                       # a tiny model learns to sort digits, on a Ray cluster
hatch run rlhf algorithm=ppo         # with a critic; or dapo, rloo, reinforce++, gspo, dr_grpo
hatch run rlhf plan=auto             # profiles itself and finds the best plan
hatch run rlhf plan=spatial scheduling.max_staleness=1    # asynchronous: sampling goes on meanwhile
hatch run rlhf launcher=inline       # the same program in one process, for pdb
hatch run rlhf model=smollm2         # a real model of 135 M parameters learns to add
hatch run rlhf trainer.engine=fsdp trainer.ranks=2    # the trainer on two processes
"""

import itertools
import sys
from typing import Any

from actor import Actor, sync
from evaluation import evaluate
from settings import CHOICES, CONFIG, RlhfConfig

from rlinf.workers import Cluster, FlowPlanner, WorkerGroup, main_guard, wait_all
from rlinf.workers.ahead import Ahead
from rlinf.workers.checkpoint import Checkpoints
from rlinf.workers.hosts import (
    CriticWorker,
    InferenceWorker,
    ReferenceWorker,
    RewardWorker,
    RolloutWorker,
)
from rlinf.workers.program import described, run_folder
from rlinf.workers.recovery import Recovery
from rlinf.workers.run import Run

Groups = tuple[WorkerGroup, WorkerGroup, WorkerGroup, tuple[WorkerGroup | None, ...]]


def launch(cluster: Cluster, config: RlhfConfig) -> Groups:
    """Start trainer, rollout and reward; where wanted reference, inference and critic."""
    model, learning, sizes = config.model_spec(), config.trainer_config(), config.rollout
    trainer = Actor.group(cluster, model, learning, count=learning.ranks, name="trainer")
    served = config.model_spec(sizes.dtype)
    rollout = RolloutWorker.group(cluster, served, sizes.engine, "trainer/0", name="rollout")
    reward = RewardWorker.group(cluster, config.make_reward, name="reward")
    reference = ReferenceWorker.group(cluster, model, learning, "trainer/0", name="reference")
    inference = InferenceWorker.group(cluster, model, learning, "trainer/0", name="inference")
    critic = CriticWorker.group(
        cluster, model, config.critic, "trainer/0", count=config.critic.ranks, name="critic"
    )
    started = trainer.launch(), rollout.launch(), reward.launch()
    return *started, (
        reference.launch() if config.has_reference else None,
        inference.launch() if config.has_inference else None,
        critic.launch() if config.has_critic else None,
    )


def train(config: RlhfConfig) -> None:
    """The whole flow. Every call on a group is asynchronous; `wait_all` is the only barrier."""
    task = config.make_task()
    folder, origin = run_folder("rlhf", config.folder, config.resume)
    with (
        Run(folder) as run,
        config.open_cluster(folder) as cluster,
    ):
        trainer, rollout, reward, (reference, inference, critic) = launch(cluster, config)
        held = [group for group in (reference, critic) if group is not None]
        relays = [group.compare for group in (reference, inference) if group is not None]
        relays += [] if critic is None else [critic.estimate]

        def begin() -> None:
            trainer.warm_up(config).result(None)
            for group in held:
                sync(trainer, group).result(None)

        planner = FlowPlanner(cluster, config.plan, config.scheduling, run.planned)
        run.say("starting the workers")
        checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint, origin, lambda: described(config, run.plan)
        )
        recovery = Recovery(cluster, [trainer, *held], checkpoints, begin, run)
        queue, lead = config.channels.experience_queue, config.scheduling.max_staleness

        def ask(step: int, round: int = 0, count: int | None = None) -> Any:
            """Have the prompts of a step answered and scored: (calls, where it comes out)."""
            prompts, samples = cluster.channels(step, "prompts", "samples")
            scored = cluster.channels(step, *config.experience, config=queue)
            prompts.put_many(config.requests(task, step, round, count))
            prompts.close()
            return [rollout.generate(prompts, samples), reward.score(samples, scored[0])], scored

        ahead, due = Ahead(ask, cluster.give_up, config.steps), True
        for attempt in planner.steps(recovery.steps(config.steps)):
            with attempt as step:
                due = due or config.syncs(step)
                syncs = [sync(trainer, rollout, lead > 0)] if due else []
                syncs += [] if inference is None else [sync(trainer, inference)]
                stages, scored = ahead.take(step, lead if run.plan else 0)
                stages = [*syncs, *stages]
                for round in itertools.count(1):  # more where dynamic sampling wants them
                    hops = zip(relays, itertools.pairwise(scored), strict=True)
                    stages += [relay(*ends) for relay, ends in hops]
                    *_, [judged, *_], [report, *_] = wait_all([*stages, trainer.train(scored[-1])])
                    if not isinstance(report.result, int):
                        break
                    stages, scored = ask(step, round, report.result)
                metrics = report.result.metrics()
                if critic is not None:
                    metrics |= judged.result.metrics()
                if config.eval.every and step % config.eval.every == 0:
                    sync(trainer, rollout).result(None)
                    rewards = evaluate(cluster, (rollout, reward), task, config, step)
                    metrics["eval_reward"] = rewards
                run.record(step, metrics)
            if due := attempt.failed:
                ahead.clear()
        run.finish()


if __name__ == "__main__":
    sys.exit(main_guard(train, RlhfConfig, CONFIG, choices=CHOICES))

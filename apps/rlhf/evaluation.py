"""How good the policy is on prompts that it never trains on."""

from settings import RlhfConfig
from tasks import Task

from rlinf.workers import Cluster, WorkerGroup, wait_all

__all__ = ["evaluate"]


def evaluate(
    cluster: Cluster,
    groups: tuple[WorkerGroup, WorkerGroup],
    task: Task,
    config: RlhfConfig,
    step: int,
) -> float:
    """Mean reward of sampled answers to the held-out prompts, by (rollout, reward) `groups`.

    Samples as training does, with the weights that the rollout serves; unscored answers are left
    out.
    """
    rollout, reward = groups
    prompts, samples, scored = cluster.channels(step, "eval_prompts", "eval_samples", "eval_scored")
    prompts.put_many(
        task.requests(
            f"eval{step}",
            task.held_out,
            config.sampling(task),
            config.eval.samples,
            config.rollout.max_new_tokens,
        )
    )
    prompts.close()
    wait_all([rollout.generate(prompts, samples), reward.score(samples, scored)])
    judged = [float(reward) for group in scored for reward in group.rewards[group.scored]]
    scored.delete()
    return sum(judged) / max(len(judged), 1)

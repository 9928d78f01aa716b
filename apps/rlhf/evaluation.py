"""How good the policy is on prompts that it never trains on."""

from settings import RlhfConfig
from tasks import Task

from rlinf.workers import Cluster, WorkerGroup
from rlinf.workers.evaluation import mean_reward, sampled

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
    requests = task.requests(
        f"eval{step}",
        task.held_out,
        config.sampling(task),
        config.eval.samples,
        config.rollout.max_new_tokens,
    )
    return mean_reward(sampled(cluster, groups, step, requests))

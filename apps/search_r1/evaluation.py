"""How good the policy is on questions whose answers it was never trained on."""

from settings import SearchConfig
from task import SearchTask

from rlinf.workers import Cluster, WorkerGroup
from rlinf.workers.evaluation import mean_reward, sampled
from rlinf.workers.roles import EpisodeStats

__all__ = ["evaluate"]


def evaluate(
    cluster: Cluster,
    groups: tuple[WorkerGroup, WorkerGroup],
    task: SearchTask,
    config: SearchConfig,
    step: int,
) -> dict[str, float]:
    """Accuracy on held-out questions and calls of an episode, by (rollout, reward) `groups`."""
    requests = task.requests(
        f"eval{step}",
        task.held_out,
        config.sampling(),
        config.eval.samples,
        config.rollout.max_new_tokens,
    )
    scored = sampled(cluster, groups, step, requests)
    stats = EpisodeStats()
    for group in scored:
        stats += EpisodeStats.of(group.group.episodes)
    return {
        "eval_reward": mean_reward(scored),
        "eval_calls": stats.calls / max(stats.episodes, 1),
    }

"""Sampling and scoring beside the training: how good a policy is on what it never trains on."""

from collections.abc import Sequence

from rlinf.workers.cluster import Cluster
from rlinf.workers.group import WorkerGroup, wait_all
from rlinf.workers.roles import GenerationRequest, ScoredGroup

__all__ = ["mean_reward", "sampled"]


def sampled(
    cluster: Cluster,
    groups: tuple[WorkerGroup, WorkerGroup],
    step: int,
    requests: Sequence[GenerationRequest],
) -> list[ScoredGroup]:
    """Responses to `requests` by (rollout, reward) `groups`, with the weights that are serving."""
    rollout, reward = groups
    prompts, samples, scored = cluster.channels(step, "eval_prompts", "eval_samples", "eval_scored")
    prompts.put_many(list(requests))
    prompts.close()
    wait_all([rollout.generate(prompts, samples), reward.score(samples, scored)])
    found = list(scored)
    scored.delete()
    return found


def mean_reward(groups: Sequence[ScoredGroup]) -> float:
    """Of all samples that have a reward; 0 where none has."""
    judged = [float(reward) for group in groups for reward in group.rewards[group.scored]]
    return sum(judged) / max(len(judged), 1)

"""Roles: what the parts of a flow are, as protocols, and the data that travels between them."""

from rlinf.workers.roles.critic import CriticEngine, CriticStats
from rlinf.workers.roles.episode import OUTCOMES, Episodes, EpisodeStats, Outcome
from rlinf.workers.roles.inference import Compared, InferenceEngine
from rlinf.workers.roles.residency import Residency
from rlinf.workers.roles.reward import (
    STATUSES,
    RewardEngine,
    RewardModel,
    Score,
    ScoredGroup,
    Status,
)
from rlinf.workers.roles.rollout import (
    FINISH_REASONS,
    GenerationRequest,
    Group,
    RolloutEngine,
    Sampling,
)
from rlinf.workers.roles.tool import Observation, Tool, ToolFailed
from rlinf.workers.roles.trainer import PartialStats, StepStats, TrainerEngine

__all__ = [
    "Compared",
    "CriticEngine",
    "CriticStats",
    "EpisodeStats",
    "Episodes",
    "FINISH_REASONS",
    "GenerationRequest",
    "Group",
    "InferenceEngine",
    "OUTCOMES",
    "Observation",
    "Outcome",
    "PartialStats",
    "Residency",
    "RewardEngine",
    "RewardModel",
    "RolloutEngine",
    "STATUSES",
    "Sampling",
    "Score",
    "ScoredGroup",
    "Status",
    "StepStats",
    "Tool",
    "ToolFailed",
    "TrainerEngine",
]

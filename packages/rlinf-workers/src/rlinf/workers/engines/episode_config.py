"""How episodes are rolled out, as plain data."""

from dataclasses import dataclass, field

from rlinf.workers.bounds import Natural
from rlinf.workers.engines.generate_config import GenerateConfig
from rlinf.workers.episodes.episode import EpisodeLimits

__all__ = ["EpisodeConfig"]


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """How episodes are rolled out.

    Attributes:
        limits: What each may use up.
        engine: Limits of the engine.
        gather_steps: An answer of a tool waits so many decoding steps at most for others to be
            read together with it.
    """

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    engine: GenerateConfig = field(default_factory=GenerateConfig)
    gather_steps: Natural = 4

"""The keys of this app's configuration, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rlinf.workers.bounds import Count, Natural, Positive
from rlinf.workers.course import PlanningConfig
from rlinf.workers.engines.imitation import ImitationConfig
from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.policy_trainer import PolicyTrainerConfig
from rlinf.workers.engines.simulation.fleet import SimulatorConfig
from rlinf.workers.engines.simulation.seeds import episode_seed
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.roles.policy import Policy
from rlinf.workers.roles.simulator import CollectRequest, Spaces
from rlinf.workers.run_config import RunConfig

__all__ = ["CONFIG", "EmbodiedConfig", "EnvConfig", "FilmConfig", "SchedulingConfig"]

CONFIG = Path(__file__).with_name("config.yaml")


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """The environments; `env=NAME` means `env.name=NAME`.

    Attributes:
        name: A preset of config.yaml.
        world: Which environment.
        parallelism: How many of them act at the same time.
        lanes: Processes they are spread over; 0: one a core.
        deadline_s: For one step or reset: an environment that is stuck is replaced.
        start_s: For one environment to be made.
        restarts: How often a process may be lost with no trajectory completed in between.
        codec: By which pictures travel to the trainer: patches, patches_zlib; empty: as they are.
    """

    name: str = "cartpole_balance"
    world: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    parallelism: Count = 16
    lanes: Natural = 0
    deadline_s: Positive = 30.0
    start_s: Positive = 300.0
    restarts: Natural = 3
    codec: str = ""


@dataclass(frozen=True, slots=True)
class FilmConfig:
    """The episode that is filmed at the end, and others before.

    Attributes:
        steps: Pictures, at most; 0: no film at the end.
        every: Iterations after which one more is filmed beside the training; 0: none.
        options: Of the environment, over those of `env.world`.
        variables: Environment variables, over those of `env.world`.
        fps: Pictures a second.
        timeout_s: For the whole of it.
    """

    steps: Natural = 200
    every: Natural = 0
    options: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    fps: Count = 25
    timeout_s: Positive = 120.0


@dataclass(frozen=True, slots=True)
class SchedulingConfig(PlanningConfig):
    """`PlanningConfig`, and how far acting may be ahead of learning.

    Attributes:
        max_staleness: Acting is so many iterations ahead of learning and goes on beside it, by
            weights that are so many iterations old at most. 0: each waits for the other.
    """

    max_staleness: Natural = 0


@dataclass(frozen=True, slots=True)
class EmbodiedConfig(RunConfig):
    """Everything about a run.

    Attributes:
        algorithm: ppo: with the policy's value, over streams of steps. grpo: whole episodes,
            `group` of them from the same beginning.
        acting: Where the policy acts. inside: in the simulator's worker, a small one in the
            environments' own processes. apart: in a worker of its own; a plan lets it take turns
            with the simulator, or gives both devices of their own and lets two groups of
            environments alternate between them.
        steps: Iterations.
        horizon: Decisions of each environment in one of them.
        group: Episodes that begin alike, with grpo.
    """

    env: EnvConfig = field(default_factory=EnvConfig)
    algorithm: Literal["ppo", "grpo"] = "ppo"
    acting: Literal["inside", "apart"] = "inside"
    steps: Count = 50
    horizon: Count = 128
    group: Count = 8
    policy: PolicySpec = field(default_factory=PolicySpec)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    trainer: PolicyTrainerConfig = field(default_factory=PolicyTrainerConfig)
    film: FilmConfig = field(default_factory=FilmConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        ahead = self.scheduling.max_staleness
        if ahead and self.plan in ("temporal", "auto"):
            raise ValueError(
                f"with scheduling.max_staleness={ahead} acting goes on beside learning, which "
                f"plan={self.plan} does not allow for: plan=spatial, or the path of a saved plan"
            )
        if ahead and self.acting == "apart":
            raise ValueError("scheduling.max_staleness needs acting=inside")

    def make_policy(self, spaces: Spaces) -> Policy:
        """What acts and learns; called where it does."""
        return build_policy(replace(self.policy, seed=self.seed), spaces)

    def simulator_config(self) -> SimulatorConfig:
        """How the environments are run."""
        env = self.env
        return SimulatorConfig(
            environments=env.parallelism,
            lanes=env.lanes,
            steps=self.horizon,
            deadline_s=env.deadline_s,
            start_s=env.start_s,
            restarts=env.restarts,
            seed=self.seed,
            codec=env.codec,
        )

    def trainer_config(self) -> PolicyTrainerConfig:
        """How the policy learns."""
        advantage: Literal["gae", "grpo"] = "gae" if self.algorithm == "ppo" else "grpo"
        return replace(self.trainer, advantage=advantage, seed=self.seed)

    def requests(self, step: int, lanes: Sequence[int]) -> list[CollectRequest]:
        """What is asked of the lanes, which have so many environments each."""
        seeds = [self._seed(step, i) for i in range(self.env.parallelism)]
        ends = [sum(lanes[: lane + 1]) for lane in range(len(lanes))]
        return [
            CollectRequest(step, lane, self.horizon, tuple(seeds[end - size : end]))
            if self.algorithm == "grpo"
            else CollectRequest(step, lane, self.horizon)
            for lane, (end, size) in enumerate(zip(ends, lanes, strict=True))
        ]

    def film_spec(self) -> EnvironmentSpec:
        """The environment as it is filmed."""
        world, film = self.env.world, self.film
        return replace(
            world,
            options={**world.options, **film.options},
            variables={**world.variables, **film.variables},
        )

    def _seed(self, step: int, index: int) -> int:
        """Of an episode, the same for all of its group."""
        return episode_seed(self.seed, index // self.group, step)

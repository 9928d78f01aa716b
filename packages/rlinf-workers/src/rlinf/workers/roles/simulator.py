"""Simulator: requests in, trajectories of environments out. Plain numpy, cheap to send.

An environment is one world that a policy acts in; it says what it shows and what it takes
(`Spaces`). A *decision* is what a policy chooses at once: one action, or a chunk of several that
are carried out one after another. All arrays over decisions have the time first: [T, E, ...].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rlinf.workers.roles.residency import Residency

__all__ = [
    "Acted",
    "Actor",
    "BatchOutcome",
    "CollectRequest",
    "Decision",
    "Demonstration",
    "Environment",
    "EnvironmentBatch",
    "Episode",
    "Field",
    "Observation",
    "Outcome",
    "Shown",
    "SimulatorEngine",
    "Spaces",
    "Trajectory",
]

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Observation = Mapping[str, Array]
"""Arrays by name: `state` float32 [S], `image` uint8 [H, W, 3], `instruction` int32 [L] ..."""


@dataclass(frozen=True, slots=True)
class Field:
    """Shape (of one environment) and numpy dtype of an array."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Spaces:
    """What an environment shows and takes.

    Attributes:
        observation: The arrays of an observation, by name.
        low: Least value of each number of an action.
        high: Largest value of each.
    """

    observation: Mapping[str, Field]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def action_size(self) -> int:
        """Numbers of one action."""
        return len(self.low)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action led to. `success` may be true at any step of an episode."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    success: bool = False


class Environment(Protocol):
    """One world. It may keep and reuse the arrays of its observations: they are copied at once."""

    spaces: Spaces

    def reset(self, seed: int) -> Observation:
        """Begin an episode; the same seed begins the same one, whatever came before."""

    def step(self, action: FloatArray) -> Outcome:
        """Carry out one action, float32 [A] within `spaces`."""

    def render(self) -> npt.NDArray[np.uint8]:
        """A picture of the world, [H, W, 3]. Raises `RenderingUnavailable`."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutcome:
    """What E actions led to: observations by name, [E, ...]; the others [E], see `Outcome`."""

    observation: Observation
    rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    success: BoolArray


class EnvironmentBatch(Protocol):
    """E worlds that are simulated together, as on an accelerator. They do not reset themselves."""

    def reset(self, indexes: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64]) -> Observation:
        """Begin episodes in some of them; what all of them show now, [E, ...]."""

    def step(self, actions: FloatArray) -> BatchOutcome:
        """Carry out an action of each, float32 [E, A]; also of those whose episode has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What an actor chose for B environments.

    Attributes:
        choices: What was drawn, as the trainer needs it: [B, ...] of the actor's `choice`.
        actions: What it means for the environment, float32 [B, C, A]; need not be within bounds.
        logprobs: Of the choice as a whole, float32 [B].
    """

    choices: Array
    actions: FloatArray
    logprobs: FloatArray


class Actor(Protocol):
    """A policy as the simulator needs it. What it draws depends on its arguments alone.

    Attributes:
        noise: What kind of random numbers `act` takes for each environment.
        noise_size: How many.
        choice: Shape and dtype of one environment's choice.
        chunk: Actions of a decision.
        light: It is picklable, needs no torch and takes microseconds: it may act in the
            environments' own processes, so that none waits for another.
    """

    noise: Literal["normal", "uniform"]
    noise_size: int
    choice: Field
    chunk: int
    light: bool

    def act(self, observations: Observation, noise: FloatArray | None) -> Decision:
        """Choose for B environments, `noise` [B, noise_size]; without noise the likeliest."""

    def weights(self) -> FloatArray:
        """All weights in one array, float32 [P]; P is fixed. Only a light actor needs this."""

    def load(self, weights: FloatArray) -> None:
        """Act with these weights, the inverse of `weights`."""


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """An episode in which the environment's own script acted.

    Attributes:
        observations: By name, [N, ...].
        actions: What the script wanted then, float32 [N, A].
        success: Whether it got there.
    """

    observations: Mapping[str, Array]
    actions: FloatArray
    success: bool


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that has ended, or was lost.

    Attributes:
        environment: Index of the environment in the simulator.
        seed: It began with.
        reward: Sum of its rewards.
        steps: Actions that were carried out.
        success: Whether any of its steps was a success; counted once an episode.
        lost: Its process died or was killed.
    """

    environment: int
    seed: int
    reward: float
    steps: int
    success: bool
    lost: bool = False


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """Let the environments of one lane act.

    Attributes:
        number: With the simulator's seed and an environment's index it decides the noise.
        lane: Which.
        steps: Decisions of each environment, at most.
        seeds: Empty: the environments go on where they were, and begin a new episode by
            themselves where one ends. One an environment: each begins an episode with its seed and
            rests once it has ended.
        greedy: Take the likeliest choices, without noise.
    """

    number: int
    lane: int
    steps: int
    seeds: tuple[int, ...] = ()
    greedy: bool = False

    @property
    def uid(self) -> str:
        """Names it in a run."""
        return f"{self.number}.{self.lane}"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """T decisions of E environments.

    Attributes:
        uid: Of the request.
        environments: int32 [E], their indexes in the simulator.
        observations: By name, [T + 1, E, ...]: row t is what decision t was made on. After an end
            row t + 1 shows the new episode; what the old one ended with is in `finals`.
        choices: [T, E, ...] of the actor's `choice`.
        logprobs: float32 [T, E], of each choice when it was drawn.
        rewards: float32 [T, E], summed over the actions of a decision that were carried out.
        terminated: bool [T, E]: the episode ended by itself; nothing comes after it.
        truncated: bool [T, E]: it was cut off here (a time limit, a lost process); the value of
            what it ended with stands for the rest.
        valid: bool [T, E]: the decision was carried out. Not valid: the environment rests after
            its episode, or its process was lost; a row that is not valid ends the valid ones.
        steps: int32 [T, E]: actions carried out; fewer than the chunk where the episode ended.
        finals: By name, [K, ...]: the observations after those decisions that ended an episode.
        ends: int32 [K, 2]: their t and e.
        episodes: Those that ended meanwhile, or were lost.
        seeds: int64 [E], of the episode that each environment was in last.
        version: Of the weights that acted.
    """

    uid: str
    environments: IntArray
    observations: Mapping[str, Array]
    choices: Array
    logprobs: FloatArray
    rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    valid: BoolArray
    steps: IntArray
    finals: Mapping[str, Array]
    ends: IntArray
    episodes: tuple[Episode, ...]
    seeds: npt.NDArray[np.int64]
    version: int

    @property
    def token_count(self) -> int:
        """Actions that were carried out: what the records of stages count."""
        return int(self.steps.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What the environments of a lane show, on its way to a policy elsewhere.

    Attributes:
        request: Under way there.
        t: Which of its decisions is to be made.
        observations: By name, [E, ...].
        noise: float32 [E, noise_size], for the draw; None: the likeliest choices.
    """

    request: CollectRequest
    t: int
    observations: Observation
    noise: FloatArray | None

    @property
    def token_count(self) -> int:
        """Decisions to be made."""
        return len(next(iter(self.observations.values())))


@dataclass(frozen=True, slots=True, eq=False)
class Acted:
    """The answer to a `Shown`: the decision, and the version of the weights that made it."""

    request: CollectRequest
    t: int
    decision: Decision
    version: int

    @property
    def token_count(self) -> int:
        """Decisions."""
        return len(self.decision.logprobs)


@runtime_checkable
class SimulatorEngine(Residency, Protocol):
    """Environments in lanes: those of a lane are stepped together, lanes do not wait for others."""

    @property
    def lanes(self) -> int:
        """How many."""

    def collect(self, requests: Sequence[CollectRequest]) -> Iterator[tuple[int, Trajectory]]:
        """Carry out all requests side by side; (index of the request, its trajectory) as they end.

        At most one request a lane. A trajectory does not depend on the other lanes, nor on how the
        environments are distributed over lanes.
        """

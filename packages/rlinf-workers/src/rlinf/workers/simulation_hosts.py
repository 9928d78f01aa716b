"""Workers of a flow in which a policy acts in environments.

    simulator  requests -> trajectories      a lane's trajectory as soon as it is complete
    trainer    trajectories -> a step        learns after the last one

The policy acts inside of the simulator, or in a worker of its own; then these two form a ring:

    simulator  requests, decisions -> what the lanes show, and in the end trajectories
    actor      what lanes show -> decisions

Weights go from the trainer to the simulators as `rlinf.workers.weights` says.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf.comm import Coded
from rlinf.workers.hosts import PublisherWorker
from rlinf.workers.roles.simulator import Acted, CollectRequest, Shown, Trajectory
from rlinf.workers.stages import Again, stage
from rlinf.workers.worker import Worker

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from rlinf.workers.engines.imitation import ImitationConfig
    from rlinf.workers.engines.policy_trainer import (
        PolicyStats,
        PolicyTrainer,
        PolicyTrainerConfig,
    )
    from rlinf.workers.engines.simulation.fleet import SimulatorConfig, SimulatorStatistics
    from rlinf.workers.engines.simulation.simulator import ProcessSimulator
    from rlinf.workers.engines.simulation.stepped import ActorElsewhere, SteppedSimulator
    from rlinf.workers.environments import EnvironmentSpec
    from rlinf.workers.roles.policy import Policy
    from rlinf.workers.roles.simulator import Spaces

__all__ = [
    "ActorWorker",
    "PolicyTrainerWorker",
    "RendererWorker",
    "SimulatorWorker",
    "SteppedSimulatorWorker",
]

MakePolicy = Callable[["Spaces"], "Policy"]


class _Target:
    """The policy that a simulator acts by, as what weights are loaded into."""

    def __init__(self, policy: "Policy") -> None:
        from rlinf.workers.engines.parameters import state_of

        self.policy, self.actor, self.version = policy, policy.actor(), 0
        self._state = state_of(policy)  # type: ignore[arg-type]

    def state(self) -> "Mapping[str, Tensor]":
        """See `WeightTarget`."""
        return self._state

    def load_state(self, state: "Mapping[str, Tensor]", version: int) -> None:
        """See `WeightTarget`."""
        from rlinf.workers.engines.parameters import load_state

        load_state(self._state, state)
        if self.actor.light:
            self.actor.load(self.policy.actor().weights())
        self.version = version


class _Follower(Worker):
    """Acts by the weights that a trainer publishes."""

    def _follow(self, policy: "Policy", trainer: str) -> None:
        from rlinf.workers.weights import WeightReceiver

        self._target = _Target(policy)
        self._receiver = WeightReceiver(self.endpoint, self._target)
        self._trainer = trainer

    def load_weights(self, version: int) -> str:
        """Act by the trainer's weights of this version; returns their fingerprint."""
        return self._receiver.fetch(self._trainer, version).fingerprint

    def recovered(self) -> None:
        """Act by the trainer's current weights, however busy the trainer is."""
        from rlinf.workers.weights import WeightsUnknown

        with contextlib.suppress(WeightsUnknown):
            self._receiver.fetch(self._trainer)


class _Environments(Worker):
    """Has environments in processes of its own."""

    _simulator: "ProcessSimulator"

    def lanes(self) -> list[int]:
        """How many environments each lane has."""
        return [len(self._simulator.lane_environments(i)) for i in range(self._simulator.lanes)]

    def statistics(self) -> "SimulatorStatistics":
        """What was done so far, since the last start."""
        return self._simulator.statistics()

    def pids(self) -> tuple[int, ...]:
        """Of the lanes' processes."""
        return self._simulator.pids

    def cpu_s(self) -> float:
        """See `Worker`: mostly the environments'."""
        return super().cpu_s() + self._simulator.cpu_s()

    def close(self) -> None:
        """End the environments' processes."""
        self._simulator.close()


class SimulatorWorker(_Follower, _Environments):
    """Environments, and the policy that acts in them.

    A restarted one begins new episodes, with the trainer's current weights.

    Args:
        spec: The environment.
        config: How many, and how.
        make_policy: The policy for what they show and take.
        trainer: Who publishes its weights.
        spaces: What they show and take; None: it is looked up.
    """

    def __init__(
        self,
        spec: "EnvironmentSpec",
        config: "SimulatorConfig",
        make_policy: MakePolicy,
        trainer: str,
        spaces: "Spaces | None" = None,
    ) -> None:
        from rlinf.workers.engines.simulation.lane import find_spaces
        from rlinf.workers.engines.simulation.simulator import ProcessSimulator

        spaces = spaces or find_spaces(spec, config.start_s)
        self._follow(make_policy(spaces), trainer)
        self._simulator = ProcessSimulator(spec, config, self._target.actor, spaces)
        self._codec = config.codec

    @stage
    def collect(self, requests: list[CollectRequest]) -> Iterator[tuple[int, Trajectory]]:
        """One trajectory a request, in the order of completion."""
        self._simulator.version = self._target.version
        for index, found in self._simulator.collect(requests):
            yield index, _coded(found, self._codec)


class SteppedSimulatorWorker(_Environments):
    """Environments whose policy is elsewhere: the head of a ring in which an `ActorWorker` acts.

    A restarted one begins new episodes; what it was in the middle of has nothing valid in it.

    Args:
        actor: What has to be known of the policy's actor (`ActorWorker.outline`).
    """

    _simulator: "SteppedSimulator"

    def __init__(
        self,
        spec: "EnvironmentSpec",
        config: "SimulatorConfig",
        actor: "ActorElsewhere",
        spaces: "Spaces",
    ) -> None:
        from rlinf.workers.engines.simulation.stepped import SteppedSimulator

        self._simulator = SteppedSimulator(spec, config, actor, spaces)
        self._codec = config.codec

    @stage
    def step(self, items: list[CollectRequest | Acted]) -> list[Again | Trajectory]:
        """What the lanes show goes round; trajectories leave."""
        answers = self._simulator.advance(items)
        return [
            _coded(found, self._codec) if isinstance(found, Trajectory) else Again(found)
            for found in answers
        ]


class ActorWorker(_Follower):
    """A policy that acts for environments elsewhere.

    It answers for each lane by itself, so what a lane is told does not depend on how many lanes
    the plan lets it see at once.
    """

    def __init__(self, spaces: "Spaces", make_policy: MakePolicy, trainer: str) -> None:
        self._follow(make_policy(spaces), trainer)

    def outline(self) -> "ActorElsewhere":
        """What a simulator has to know of it."""
        from rlinf.workers.engines.simulation.stepped import ActorElsewhere

        return ActorElsewhere.of(self._target.actor)

    @stage
    def act(self, shown: list[Shown]) -> list[Acted]:
        """A decision for each lane."""
        return [
            Acted(
                one.request,
                one.t,
                self._target.actor.act(one.observations, one.noise),
                self._target.version,
            )
            for one in shown
        ]


class RendererWorker(_Follower):
    """Draws episodes, beside everything else: nobody waits for it, and its loss costs a film."""

    host_only = True

    def __init__(self, spaces: "Spaces", make_policy: MakePolicy, trainer: str) -> None:
        self._follow(make_policy(spaces), trainer)

    def film(
        self, spec: "EnvironmentSpec", seed: int, steps: int, timeout_s: float
    ) -> "list[npt.NDArray[np.uint8]]":
        """Pictures of an episode by the newest weights; see `simulation.lane.film`."""
        from rlinf.workers.engines.simulation.lane import film

        self._receiver.fetch(self._trainer)
        return film(spec, self._target.actor, seed, steps, timeout_s)


def _coded(found: Trajectory, codec: str) -> Trajectory:
    """With its pictures to be sent through a codec, if any; they arrive as ordinary arrays."""
    if not codec:
        return found
    shown: dict[str, Any] = {
        name: Coded(array, codec) if array.dtype == "uint8" else array
        for name, array in found.observations.items()
    }
    return replace(found, observations=shown)


class PolicyTrainerWorker(PublisherWorker):
    """Learns from trajectories; several ranks (`group(..., count=n)`) share each minibatch."""

    _engine: "PolicyTrainer"

    def __init__(
        self, spaces: "Spaces", config: "PolicyTrainerConfig", make_policy: MakePolicy
    ) -> None:
        from rlinf.workers.team import Team

        self._spaces, self._config, self._make_policy = spaces, config, make_policy
        self._team = Team.of(self)
        super().__init__()

    def _begin(self) -> None:
        from rlinf.workers.engines.policy_trainer import PolicyTrainer

        self._engine = PolicyTrainer(self._make_policy(self._spaces), self._config, self._team)

    def warm_up(self, spec: "EnvironmentSpec", config: "ImitationConfig", seed: int) -> float:
        """Imitate the environment's script; the mean log-prob of its tokens at the end."""
        from rlinf.workers.engines.imitation import collect_demonstrations, imitate

        policy: Any = self._engine.policy
        shown = collect_demonstrations(spec, config)
        reached = imitate(policy, shown, policy.actor().chunk, config, seed)
        self._engine.adopt()
        return reached

    @stage(finish="finish_step")
    def train(self, trajectories: Sequence[Trajectory]) -> int:
        """Take in a chunk; actions that it holds."""
        return self._engine.accumulate(trajectories)

    def finish_step(self) -> "PolicyStats":
        """Learn from everything that was taken in."""
        return self._engine.finish_step()

    def close(self) -> None:
        """See `Worker`."""
        self._team.close()

    def count_tokens(self, item: object) -> int:
        """See `Worker`."""
        return item.token_count if isinstance(item, Trajectory) else 0

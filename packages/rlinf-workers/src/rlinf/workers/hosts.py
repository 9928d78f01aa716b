"""Workers that host an engine: the usual parts of a flow, ready to be launched.

    rollout  requests -> groups          streams groups in the order in which they complete
    reward   groups -> scored groups
    inference scored groups -> the same  adds log-probs of the policy that it is given
    critic   scored groups -> the same   adds advantages, learns from the rewards itself
    trainer  scored groups -> a step     accumulates chunk by chunk, steps after the last one

Each is built on its own process from plain data; heavy imports happen there. Weights go from the
trainer to the rollouts as `rlinf.workers.weights` says: a version with a fingerprint, checked on
both sides.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlinf.workers.checkpoint import SavedFile, seal
from rlinf.workers.errors import ConfigError
from rlinf.workers.random_state import load_random_state, random_state
from rlinf.workers.roles import (
    CriticStats,
    GenerationRequest,
    Group,
    PartialStats,
    ScoredGroup,
    StepStats,
)
from rlinf.workers.stages import at_once, stage
from rlinf.workers.worker import Worker

if TYPE_CHECKING:
    from rlinf.workers.engines.critic_config import CriticConfig
    from rlinf.workers.engines.generate_config import GenerateConfig
    from rlinf.workers.engines.model_spec import ModelSpec
    from rlinf.workers.engines.torch_critic import TorchCritic
    from rlinf.workers.engines.torch_inference import TorchInference
    from rlinf.workers.engines.trainer_config import TrainerConfig
    from rlinf.workers.roles import Compared, RewardEngine, RolloutEngine
    from rlinf.workers.team import Team
    from rlinf.workers.weights import WeightReceiver, WeightTarget

    class _ServingEngine(RolloutEngine, WeightTarget, Protocol):
        """A rollout engine that is given weights."""


__all__ = [
    "CriticWorker",
    "EngineWorker",
    "InferenceWorker",
    "LearnerWorker",
    "PublisherWorker",
    "ReferenceWorker",
    "RewardWorker",
    "RolloutWorker",
    "TrainerWorker",
]


class EngineWorker(Worker):
    """A worker whose engine can leave its devices: base of those that have a model."""

    _engine: Any

    def onload(self) -> None:
        """See `Worker`."""
        self._engine.onload()

    def offload(self) -> None:
        """See `Worker`."""
        self._engine.offload()

    def resident_bytes(self) -> int:
        """See `Worker`."""
        return int(self._engine.resident_bytes())

    def count_tokens(self, item: object) -> int:
        """See `Worker`."""
        return item.token_count if isinstance(item, (Group, ScoredGroup)) else 0


class RolloutWorker(EngineWorker):
    """Samples responses with the newest weights it has fetched.

    A restarted one asks `trainer` for the current weights before it takes any call.
    """

    def __init__(self, model: "ModelSpec", config: "GenerateConfig", trainer: str) -> None:
        from rlinf.workers.engines.plugins import ROLLOUTS, engine_maker

        self._serve(engine_maker("rollout", config.name, ROLLOUTS)(model, config), trainer)

    def _serve(self, engine: "_ServingEngine", trainer: str) -> None:
        """Sample with this engine from now on."""
        from rlinf.workers.weights import WeightReceiver

        self._engine = engine
        self._receiver = WeightReceiver(self.endpoint, self._engine)
        self._trainer = trainer
        self._due: int | None = None
        """The version to serve from the next token on; None: the one that is served."""

    @stage
    def generate(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Group]]]:
        """One group a request, in the order of completion.

        Samples that `renew` cuts off go on with the new weights, which read again what there is of
        them; each token keeps the log-prob and the version that it was drawn with.
        """
        index = {request.uid: place for place, request in enumerate(requests)}
        left = list(requests)
        while left:
            self._catch_up()
            cut: list[GenerationRequest] = []
            for groups in self._engine.bursts(left):
                done: list[tuple[int, Group]] = []
                for group in groups:
                    place = index[group.uid]
                    if self._due is None or group.complete:
                        done.append((place, group))
                    else:
                        cut.append(group.resumed(requests[place].max_new_tokens))
                yield done
                if self._due is not None:  # it may have come before the engine listened
                    self._engine.abort()
            left = cut

    def _catch_up(self) -> None:
        due, self._due = self._due, None
        if due is not None:
            self._receiver.fetch(self._trainer, due)
        if not self._receiver.fingerprint:
            from rlinf.workers.weights import WeightsUnknown

            raise WeightsUnknown(f"{self.id} has no weights yet: call load_weights first")

    @at_once
    def renew(self, version: int) -> None:
        """Serve the trainer's weights of this version from the next token on.

        Returns at once; samples that are being drawn go on with them.
        """
        self._due = version
        self._engine.abort()

    def load_weights(self, version: int) -> str:
        """Serve the trainer's weights of this version; returns their fingerprint."""
        return self._receiver.fetch(self._trainer, version).fingerprint

    def recovered(self) -> None:
        """Serve the trainer's current weights, however busy the trainer is.

        A trainer that was itself started again has none to give until it is restored.
        """
        _catch_up(self._receiver, self._trainer)


class RewardWorker(Worker):
    """Scores groups with the engine that `make()` gives, called where the worker runs."""

    host_only = True

    def __init__(self, make: "Callable[[], RewardEngine]") -> None:
        self._engine = make()

    @stage
    def score(self, groups: list[Group]) -> list[ScoredGroup]:
        """One scored group a group, in order."""
        return self._engine.score(groups)

    def count_tokens(self, item: object) -> int:
        """See `Worker`."""
        return item.token_count if isinstance(item, ScoredGroup) else 0


class LearnerWorker(EngineWorker):
    """A worker whose engine has state that checkpoints hold: base of critics and trainers.

    Its files there are `<group>-<rank>.safetensors` and `<group>-<rank>.json`.
    """

    def _begin(self) -> None:
        """Make the engine as it is at first."""
        raise NotImplementedError

    def save(self, folder: str) -> list[SavedFile]:
        """Write what decides the steps to come into `folder`, and bring it to the disk."""
        from rlinf.workers.shards import as_shards, save_tensors

        tensors, numbers = self._engine.save()
        stem = f"{folder}/{self.id.group}-{self.rank}"
        arrays, rest = Path(f"{stem}.safetensors"), Path(f"{stem}.json")
        save_tensors(arrays, as_shards(tensors))
        rest.write_text(json.dumps({"numbers": numbers, "random": random_state()}))
        return [seal(arrays), seal(rest)]

    def restore(self, folder: str | None) -> None:
        """Become what the group was when it was saved there; None: what it was constructed as.

        The number of ranks may have changed: those that are new keep their own random state. Raises
        `ConfigError`: there was no such group.
        """
        from rlinf.workers.shards import load_tensors

        if folder is None:
            self._begin()
            return
        group, here = self.id.group, Path(folder)
        own = here / f"{group}-{self.rank}.json"
        source = own if own.exists() else here / f"{group}-0.json"
        if not source.exists():
            raise ConfigError(
                f"{here} holds nothing of {group}, which its run did not have: go on with the "
                "settings of that run, or begin a new one"
            )
        read = json.loads(source.read_text())
        self._engine.restore(load_tensors(here.glob(f"{group}-*.safetensors")), read["numbers"])
        if own.exists():
            load_random_state(read["random"])


class CriticWorker(LearnerWorker):
    """Gives scored groups the advantages of their tokens, and learns values.

    A group of `config.ranks`; what a step was is the result of each.
    """

    _engine: "TorchCritic"

    def __init__(self, model: "ModelSpec", config: "CriticConfig", trainer: str) -> None:
        self._model, self._config, self._trainer = model, config, trainer
        self._team = _team("critic", self, config.ranks)
        self._begin()

    def _begin(self) -> None:
        from rlinf.workers.engines.models import build_model
        from rlinf.workers.engines.torch_critic import TorchCritic
        from rlinf.workers.weights import WeightReceiver

        model = build_model(self._model, weights=False)
        self._engine = TorchCritic(model, self._config, self._team)
        self._receiver = WeightReceiver(self.endpoint, self._engine)

    @stage(finish="finish_step")
    def estimate(self, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        """The groups with advantages, in order; adds their gradient to the step's."""
        return self._engine.estimate(groups)

    def finish_step(self) -> CriticStats:
        """Step with what was accumulated."""
        return self._engine.finish_step()

    def load_weights(self, version: int) -> str:
        """Begin from the trainer's weights of this version; returns their fingerprint."""
        return self._receiver.fetch(self._trainer, version).fingerprint

    def close(self) -> None:
        """See `Worker`."""
        self._team.close()


class InferenceWorker(EngineWorker):
    """Gives scored groups the log-probs of the trainer's policy, as of the weights loaded last."""

    fills: "ClassVar[Compared]" = "old_logprobs"
    _engine: "TorchInference"

    def __init__(self, model: "ModelSpec", config: "TrainerConfig", trainer: str) -> None:
        self._model, self._config, self._trainer = model, config, trainer
        self._begin()

    def _begin(self) -> None:
        from rlinf.workers.engines.models import build_model
        from rlinf.workers.engines.torch_inference import TorchInference
        from rlinf.workers.weights import WeightReceiver

        model = build_model(self._model, weights=False)
        self._engine = TorchInference(model, self._config, self.fills)
        self._receiver = WeightReceiver(self.endpoint, self._engine)

    @stage
    def compare(self, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        """The groups with its log-probs, in order."""
        return self._engine.compare(groups)

    def load_weights(self, version: int) -> str:
        """Be the trainer's policy of this version; returns the weights' fingerprint."""
        return self._receiver.fetch(self._trainer, version).fingerprint

    def recovered(self) -> None:
        """Be the trainer's policy as it was published last; see `RolloutWorker.recovered`."""
        _catch_up(self._receiver, self._trainer)


class ReferenceWorker(InferenceWorker, LearnerWorker):
    """Gives scored groups the log-probs that a KL penalty compares with. Learns nothing.

    Its weights are kept in checkpoints all the same: nobody else has those from before the first
    step.
    """

    fills: "ClassVar[Compared]" = "reference_logprobs"

    def recovered(self) -> None:
        """It is restored, with all that hold state."""


class PublisherWorker(LearnerWorker):
    """A learner that publishes what it has learnt: base of trainers.

    Args:
        team: Ranks that hold parts of the weights, and publish them together; None: any rank has
            them all, and the first one publishes.
    """

    def __init__(self, team: "Team | None" = None) -> None:
        from rlinf.workers.weights import WeightPublisher

        self._publishes = team is not None or self.rank == 0
        if team is None or team.size == 1:
            self._publisher = WeightPublisher(self.endpoint)
        else:
            mates = tuple(f"{self.id.group}/{k}" for k in range(team.size) if k != team.rank)
            self._publisher = WeightPublisher(self.endpoint, mates, team.gather)
        self._begin()

    def restore(self, folder: str | None) -> None:
        """See `LearnerWorker`; what was published before counts no more."""
        self._publisher.forget()
        super().restore(folder)

    def publish(self) -> int:
        """Offer the weights as they are now to every rollout; returns their version.

        Every rank offers what it holds of them.
        """
        state, version = self._engine.state(), int(self._engine.version)
        return self._publisher.publish(state, version).version if self._publishes else version


class TrainerWorker(PublisherWorker):
    """Learns from scored groups.

    The engine is that of `config.engine`; where it has several ranks, each is a worker of the group
    (`group(..., count=config.ranks)`), and every call is to be made on all of them. What a step was
    is the result of each. Weights are fetched from all: rank 0 is the one to name.
    """

    _engine: Any

    def __init__(self, model: "ModelSpec", config: "TrainerConfig") -> None:
        self._model, self._config = model, config
        self._team = _team("trainer", self, config.ranks)
        super().__init__(self._team)

    def _begin(self) -> None:
        from rlinf.workers.engines.models import build_model
        from rlinf.workers.engines.plugins import TRAINERS, engine_maker

        make = engine_maker("trainer", self._config.engine, TRAINERS)
        self._engine = make(build_model(self._model), self._config, self._team)

    @stage(finish="finish_step")
    def train(self, groups: list[ScoredGroup]) -> PartialStats:
        """Add the gradient of a chunk to the step's."""
        parts: PartialStats = self._engine.accumulate(groups)
        return parts

    def finish_step(self) -> StepStats | int:
        """Step with what was accumulated; or how many groups are to be sampled before that."""
        wanted: int = self._engine.end_round()
        return wanted or self._engine.finish_step()

    def close(self) -> None:
        """See `Worker`."""
        self._team.close()


def _catch_up(receiver: "WeightReceiver", trainer: str) -> None:
    """Fetch what the trainer offers, if it offers anything yet."""
    from rlinf.workers.weights import WeightsUnknown

    with contextlib.suppress(WeightsUnknown):
        receiver.fetch(trainer)


def _team(role: str, worker: Worker, ranks: int) -> "Team":
    """The team of a worker's group. Raises `ConfigError` where it is not as large as `ranks`."""
    from rlinf.workers.team import Team

    if ranks != worker.world_size:
        raise ConfigError(f"{role}.ranks={ranks}, but there are {worker.world_size}")
    return Team.of(worker)

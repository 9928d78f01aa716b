"""Asynchronous training: what may be begun when, and samples that go on with new weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.workers import Cluster, Worker, wait_all
from rlinf.workers.ahead import Ahead
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.parameters import state_of
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.torch_generate import GenerateConfig
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.hosts import RolloutWorker
from rlinf.workers.roles import GenerationRequest, Group, PartialStats, Sampling, ScoredGroup
from rlinf.workers.weights import WeightPublisher

MODEL = ModelSpec(vocab_size=23, hidden_size=32)
LONG = 400


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_step_uses_what_was_begun_before_the_bound(bound: int) -> None:
    version = {"now": 0}
    ahead = Ahead(lambda step: version["now"], lambda step: None, last=20)
    for step in range(1, 21):
        assert version["now"] - ahead.take(step, bound) == min(step - 1, bound)
        version["now"] = step


@pytest.mark.parametrize("step", [1, 101])
def test_no_run_begins_with_a_burst(step: int) -> None:
    """S5, S4: wherever it begins so many steps are begun, and never none."""
    for bound in (0, 2):
        begun: list[int] = []
        Ahead(begun.append, lambda _: None, last=500).take(step, bound)
        assert begun == list(range(step, step + bound + 1))


def test_nothing_is_begun_after_the_last_step_and_what_is_left_is_given_up() -> None:
    begun: list[int] = []
    given_up: list[int] = []
    ahead = Ahead(begun.append, given_up.append, last=6)
    ahead.take(4, 9)
    assert begun == [4, 5, 6]
    ahead.clear()
    assert sorted(given_up) == [5, 6]
    ahead.take(4, 0)
    assert begun == [4, 5, 6, 4]


class Source(Worker):
    """Publishes weights that depend on their version."""

    def __init__(self) -> None:
        self._publisher = WeightPublisher(self.endpoint)

    def publish(self, version: int) -> int:
        return self._publisher.publish(state_of(weights(version)), version).version


def weights(version: int) -> torch.nn.Module:
    model = build_model(MODEL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.15)
    return model


def request(uid: str, tokens: int, n: int) -> GenerationRequest:
    return GenerationRequest(uid, np.array([5, 6, 7], np.int32), n, tokens, Sampling())


def recomputed(group: Group, version: int) -> np.ndarray:
    """Log-probs of all its tokens by the weights of a version, [n, T]."""
    trainer = TorchTrainer(weights(version))
    rows = (group.prompt_ids, group.tokens, group.lengths)
    batch = PrefixBatch.of([rows], torch.device("cpu"))
    with torch.no_grad():
        return batch.responses.spread(trainer._logprobs(batch, group.sampling)).numpy()


def interrupted() -> list[Group]:
    """Groups whose weights were renewed once while they were being drawn."""
    with Cluster(launcher="inline") as cluster:
        source = Source.group(cluster, name="source").launch()
        rollout = RolloutWorker.group(
            cluster, MODEL, GenerateConfig(), "source/0", name="rollout"
        ).launch()
        rollout.load_weights(source.publish(1).result(60)[0]).result(60)
        prompts, samples = cluster.channels(1, "prompts", "samples")
        prompts.put_many([request("first", 2, 1), request("long", LONG, 3)])
        prompts.close()
        handle = rollout.generate(prompts, samples)
        first = samples.get(timeout=60)
        rollout.renew(source.publish(2).result(60)[0]).result(60)
        wait_all([handle], timeout=120)
        return [first, *samples]


@pytest.mark.timeout(300)
def test_samples_under_way_go_on_with_new_weights() -> None:
    """Each token has the log-prob and the version of the weights that it was drawn with."""
    groups = {group.uid: group for group in interrupted()}
    first, long = groups["first"], groups["long"]
    assert first.versions.tolist() == [1] and first.mixed == 0 and first.complete
    assert long.versions.tolist() == [1] * 3 and long.mixed == 3 and long.complete
    assert long.lengths.tolist() == [LONG] * 3
    assert long.token_versions is not None
    assert set(np.unique(long.token_versions)) == {1, 2}
    assert (np.diff(long.token_versions, axis=1) >= 0).all()
    expected = np.where(
        long.token_versions == 1, recomputed(long, version=1), recomputed(long, version=2)
    )
    np.testing.assert_allclose(long.logprobs, expected, atol=2e-4)
    assert not np.allclose(long.logprobs, recomputed(long, version=2), atol=1e-2)


def learnt_from(config: TrainerConfig, logprob: float = -3.0) -> PartialStats:
    """What a trainer at version 4 makes of three samples that began with 1, 3 and 4."""
    shape = (3, 4)
    group = Group(
        uid="g",
        prompt_ids=np.array([1, 2], np.int32),
        tokens=np.ones(shape, np.int32),
        lengths=np.full(3, 4, np.int32),
        logprobs=np.full(shape, logprob, np.float32),
        finish=np.ones(3, np.uint8),
        versions=np.array([1, 3, 4], np.int32),
        sampling=Sampling(),
        token_versions=np.array([[1, 2, 3, 4], [3, 3, 4, 4], [4, 4, 4, 4]], np.int32),
    )
    trainer = TorchTrainer(build_model(MODEL), replace(config, min_batch_tokens=0))
    trainer._version = 4
    rewards = np.array([1.0, 0.0, 0.5], np.float32)
    return trainer.accumulate([ScoredGroup(group, rewards, np.zeros(3, np.uint8))])


def test_a_sample_counts_as_old_as_its_first_token_and_a_partial_one_is_counted() -> None:
    """S6: it is left out by itself, not with its group."""
    parts = learnt_from(TrainerConfig(max_staleness=2))
    assert (parts.stale, parts.mixed, parts.staleness) == (1, 2, 3)
    assert parts.rows == 1, "that of the middle reward has nothing to teach"


def test_weights_above_the_cap_are_counted() -> None:
    """Truncated importance sampling: p_trainer / p_rollout, at most the cap."""
    config = TrainerConfig(old_logprobs="trainer", importance_cap=2.0)
    assert learnt_from(config).truncated == 0
    far = learnt_from(config, logprob=-9.0)
    assert far.truncated == far.trained_tokens == 8 and far.kl > 0

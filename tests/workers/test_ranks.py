"""A trainer of several ranks in a flow: real processes on a Ray cluster."""

import numpy as np
import pytest

from rlinf.workers import Cluster, ClusterConfig, wait_all
from rlinf.workers.checkpoint import CheckpointConfig, Checkpoints
from rlinf.workers.engines.models import ModelSpec
from rlinf.workers.engines.plugins import TRAINERS, engine_maker
from rlinf.workers.engines.torch_generate import GenerateConfig
from rlinf.workers.engines.torch_trainer import TrainerConfig
from rlinf.workers.errors import ConfigError, StartError
from rlinf.workers.hosts import RewardWorker, RolloutWorker, TrainerWorker
from rlinf.workers.recovery import Recovery
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup
from rlinf.workers.testing import misbehave, shared_ray

TINY = ModelSpec("tiny", vocab_size=16, hidden_size=16, layers=2, heads=2)
FSDP = TrainerConfig(engine="fsdp", ranks=2)
STEPS = 3


class Judge:
    """The reward of a response is its first token."""

    def score(self, groups):
        return [
            ScoredGroup.of(group, [Score(float(token)) for token in group.tokens[:, 0]])
            for group in groups
        ]


class Trainer(TrainerWorker):
    """Dies where it is told to, once."""

    def fail(self, rank, incarnation):
        if (rank, incarnation) == (self.rank, self.context.incarnation):
            misbehave("kill")


def requests(step):
    return [
        GenerationRequest(f"{step}.{i}", np.array([3 + i, 5], np.int32), 4, 4, Sampling(seed=step))
        for i in range(4)
    ]


def run(launcher, config, folder, fatal=None):
    """The losses of the steps and the fingerprints of the weights; a rank dies in step `fatal`."""
    found = {}
    with Cluster(ClusterConfig(restarts=2), launcher) as cluster:
        trainer = Trainer.group(cluster, TINY, config, count=config.ranks, name="trainer").launch()
        rollout = RolloutWorker.group(
            cluster, TINY, GenerateConfig(), "trainer/0", name="rollout"
        ).launch()
        reward = RewardWorker.group(cluster, Judge, name="reward").launch()
        checkpoints = Checkpoints(folder, CheckpointConfig(every=1))
        recovery = Recovery(cluster, [trainer], checkpoints)
        for attempt in recovery.steps(STEPS):
            with attempt as step:
                [version, *_] = trainer.publish().result(60)
                [mark] = rollout.load_weights(version).result(60)
                prompts, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
                prompts.put_many(requests(step))
                prompts.close()
                if step == fatal:
                    trainer.fail(1, 0)
                *_, [report, *others] = wait_all(
                    [
                        rollout.generate(prompts, samples),
                        reward.score(samples, scored),
                        trainer.train(scored),
                    ]
                )
                assert all(other.result == report.result for other in others)
                found[step] = (report.result.metrics()["loss"], mark)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fatal", [None, 2])
def test_two_ranks_learn_as_one_and_go_back_together_where_one_dies(tmp_path, fatal):
    expected = run("inline", TrainerConfig(), tmp_path / "one")
    shared_ray()
    found = run("ray", FSDP, tmp_path / "two", fatal)
    assert found.keys() == expected.keys()
    for step, (loss, _) in found.items():
        assert loss == pytest.approx(expected[step][0], abs=1e-5)
    assert len({mark for _, mark in found.values()}) == STEPS
    assert found[1][1] == expected[1][1], "both publish the same first weights, to the last bit"


def test_a_number_of_ranks_that_is_not_there_is_refused():
    with (
        pytest.raises(StartError, match=r"trainer\.ranks=2, but there are 1"),
        Cluster(launcher="inline") as cluster,
    ):
        TrainerWorker.group(cluster, TINY, FSDP, name="trainer").launch().wait_ready(60)


def test_an_engine_nobody_knows_is_refused():
    with (
        pytest.raises(StartError, match=r"trainer\.engine=x is not known: choose one of torch, fs"),
        Cluster(launcher="inline") as cluster,
    ):
        config = TrainerConfig(engine="x")
        TrainerWorker.group(cluster, TINY, config, name="trainer").launch().wait_ready(60)


def test_an_engine_of_another_distribution_is_found(tmp_path, monkeypatch):
    (tmp_path / "others.py").write_text("def make(model, config, team):\n    return 'theirs'\n")
    info = tmp_path / "others-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    points = "[rlinf.engines]\ntrainer.theirs = others:make\ntrainer.torn = not_there:make\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    assert engine_maker("trainer", "theirs", TRAINERS)(None, None, None) == "theirs"
    with pytest.raises(ConfigError, match="torch, fsdp, megatron, theirs, torn"):
        engine_maker("trainer", "their", TRAINERS)
    with pytest.raises(ConfigError, match=r"engine=torn cannot be loaded: No module named 'not_th"):
        engine_maker("trainer", "torn", TRAINERS)

"""The ready-made workers around the engines."""

from pathlib import Path

import pytest

from rlinf.workers import Cluster, ConfigError
from rlinf.workers.engines.models import ModelSpec
from rlinf.workers.engines.torch_generate import GenerateConfig
from rlinf.workers.engines.torch_trainer import TrainerConfig
from rlinf.workers.hosts import ReferenceWorker, RolloutWorker, TrainerWorker

TINY = ModelSpec("tiny", vocab_size=16, hidden_size=16, layers=1, heads=2)


class Reborn(RolloutWorker):
    """A rollout that can be asked to do what a restarted one does."""

    def reborn(self) -> str:
        self.recovered()
        return self._receiver.fingerprint


def test_a_restarted_rollout_serves_what_is_published_and_otherwise_waits() -> None:
    with Cluster(launcher="inline") as cluster:
        trainer = TrainerWorker.group(cluster, TINY, TrainerConfig(), name="trainer").launch()
        rollout = Reborn.group(cluster, TINY, GenerateConfig(), "trainer/0").launch()
        assert rollout.reborn().result(60) == [""]
        [version] = trainer.publish().result(60)
        assert rollout.reborn().result(60) == rollout.load_weights(version).result(60) != [""]


def test_a_checkpoint_of_a_run_without_a_group_says_so(tmp_path: Path) -> None:
    """As where a KL penalty is set for a run that goes on."""
    with Cluster(launcher="inline") as cluster:
        config = TrainerConfig(kl_coefficient=0.1)
        trainer = TrainerWorker.group(cluster, TINY, config, name="trainer").launch()
        reference = ReferenceWorker.group(
            cluster, TINY, config, "trainer/0", name="reference"
        ).launch()
        trainer.save(str(tmp_path)).result(60)
        with pytest.raises(ConfigError, match="holds nothing of reference, which its run did not"):
            reference.restore(str(tmp_path)).result(60)
        reference.save(str(tmp_path)).result(60)
        reference.restore(str(tmp_path)).result(60)

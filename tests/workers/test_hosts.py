"""The ready-made workers around the engines."""

from rlinf.workers import Cluster
from rlinf.workers.engines.models import ModelSpec
from rlinf.workers.engines.torch_generate import GenerateConfig
from rlinf.workers.engines.torch_trainer import TrainerConfig
from rlinf.workers.hosts import RolloutWorker, TrainerWorker

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

"""The trainer of this app: it can warm up on demonstrations, and others get its weights.

The program imports this too, and has no use for torch: what needs it is imported where it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from settings import RlhfConfig, SftConfig
from tasks import Task

from rlinf.comm import Handle
from rlinf.workers import WorkerGroup
from rlinf.workers.hosts import TrainerWorker
from rlinf.workers.roles import Group

__all__ = ["Actor", "sync"]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums of several threads round differently, and many steps make a difference large.

    With one, every plan starts from the same weights, and runs can be compared.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Actor(TrainerWorker):
    """`TrainerWorker` with a supervised start."""

    def warm_up(self, config: RlhfConfig) -> float:
        """Imitate demonstrations until sampled held-out answers are right often enough.

        Returns that share of right answers, 0 to 1, as it was measured last.
        """
        sft, task = config.sft, config.make_task()
        with _one_thread():
            return self._warm_up(config, sft, task)

    def _warm_up(self, config: RlhfConfig, sft: SftConfig, task: Task) -> float:
        batches = task.demonstrations(config.seed, sft.batch)
        look = self._look(config, sft, task)
        accuracy = look(0)
        for step in range(1, sft.steps + 1):
            self._engine.sft_step(next(batches), sft.optimiser)
            if step % sft.every == 0 and (accuracy := look(step)) >= sft.stop_at:
                break
        return accuracy

    def _look(self, config: RlhfConfig, sft: SftConfig, task: Task) -> Callable[[int], float]:
        """Measures the policy as it is; on rank 0, which tells the others."""
        from rlinf.workers.engines.models import build_model
        from rlinf.workers.engines.parameters import load_state, state_of
        from rlinf.workers.engines.torch_generate import TorchGenerate
        from rlinf.workers.engines.torch_trainer import TorchTrainer
        from rlinf.workers.shards import as_shards

        own = self._engine.model if isinstance(self._engine, TorchTrainer) else None
        model = own or build_model(self._model, weights=False)
        engine, reward = TorchGenerate(model, config.rollout.engine), task.reward()
        sampling, limit = config.sampling(task), config.rollout.max_new_tokens

        def measured(step: int) -> float:
            asked = task.requests(f"sft{step}", task.held_out, sampling, sft.samples, limit)
            groups: list[Group] = list(engine.generate(asked))
            rewards = [scored.rewards.mean() for scored in reward.score(groups)]
            return float(sum(rewards) / len(rewards))

        def look(step: int) -> float:
            if own is None:
                state = self._team.collect(as_shards(self._engine.state()))
                load_state(state_of(model), state)
            return self._team.first(measured(step) if self.rank == 0 else 0.0)

        return look


def sync(trainer: WorkerGroup, group: WorkerGroup, beside: bool = False) -> Handle[Any]:
    """Have the trainer's weights, as they are now, brought to `group`, `beside` what it is doing.

    What `group` is asked afterwards it does with these weights.
    """
    [version, *_] = trainer.publish().result(None)
    return (group.renew if beside else group.load_weights)(version)

"""The trainer of this app: it imitates demonstrations before it learns from rewards."""

from settings import SearchConfig

from rlinf.workers.hosts import TrainerWorker

__all__ = ["Actor"]

LAST = 10


class Actor(TrainerWorker):
    """`TrainerWorker` with a supervised start."""

    def warm_up(self, config: SearchConfig) -> float:
        """Imitate demonstrations; the mean loss of a token in the last steps."""
        import torch

        sft = config.sft
        batches = config.make_task().demonstrations(config.seed, sft.batch)
        losses = [0.0]
        before = torch.get_num_threads()
        # The same number in every plan: sums of several threads round differently.
        torch.set_num_threads(sft.threads)
        try:
            for _ in range(sft.steps):
                batch = next(batches)
                pairs = [(one.prompt, one.response) for one in batch]
                written = [one.written for one in batch]
                losses.append(self._engine.sft_step(pairs, sft.optimiser, written))
        finally:
            torch.set_num_threads(before)
        return sum(losses[-LAST:]) / len(losses[-LAST:])

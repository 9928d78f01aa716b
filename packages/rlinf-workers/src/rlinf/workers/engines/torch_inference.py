"""The embedded inference engine: how likely a policy thinks responses that it did not write."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.workers.engines.backbone import backbone_of
from rlinf.workers.engines.models import in_bfloat16
from rlinf.workers.engines.parameters import Served, load_state
from rlinf.workers.engines.policy_batch import runs
from rlinf.workers.engines.prefix_batch import PrefixBatch
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.roles.inference import Compared
from rlinf.workers.roles.reward import ScoredGroup
from rlinf.workers.roles.rollout import FloatArray

__all__ = ["TorchInference"]


class TorchInference(Served):
    """An `InferenceEngine` on one device: batches, precision and log-probs are the trainer's.

    Not thread-safe. Of `config` it takes the bounds of micro-batches and `autocast`; `fills` says
    what its log-probs are.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig | None = None,
        fills: Compared = "reference_logprobs",
    ) -> None:
        self._config = config or TrainerConfig()
        self._fills: Compared = fills
        self._model = model.requires_grad_(False)
        self._backbone = backbone_of(model)
        weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
        self._device = weight.device
        rows = max(1, self._config.micro_batch_logits // len(weight))
        self._max_tokens = min(rows, self._config.micro_batch_tokens)

    @torch.no_grad()
    def compare(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """See `InferenceEngine`; log-probs of the kind `full`, at the sampling's temperature."""
        found: list[ScoredGroup] = []
        for _, alike in itertools.groupby(groups, lambda group: group.group.sampling):
            for run in runs(list(alike), self._max_tokens):
                found += self._compared(run)
        return found

    def _compared(self, run: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        kept = [np.flatnonzero(group.group.lengths) for group in run]
        wide: list[FloatArray] = [np.zeros(g.group.tokens.shape, np.float32) for g in run]
        if any(map(len, kept)):
            inner = [group.group for group in run]
            rows = [
                (g.prompt_ids, g.tokens[k], g.lengths[k]) for g, k in zip(inner, kept, strict=True)
            ]
            batch = PrefixBatch.of(rows, self._device)
            with in_bfloat16(self._config.autocast, self._device):
                logits, source = self._backbone.logits(batch)
            flat = token_logprobs(logits, source, batch.targets, inner[0].sampling)
            spread = batch.responses.spread(flat).float().cpu().numpy()
            ends = np.cumsum([len(k) for k in kept])
            for block, k, own in zip(wide, kept, np.split(spread, ends[:-1]), strict=True):
                block[k] = own[:, : block.shape[1]]
        pairs = zip(run, wide, strict=True)
        if self._fills == "old_logprobs":
            return [replace(group, old_logprobs=block) for group, block in pairs]
        return [replace(group, reference_logprobs=block) for group, block in pairs]

    def save(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Its parameters (not copies): a run that goes on is held to the same policy."""
        tensors = {f"model.{name}": tensor for name, tensor in self.state().items()}
        return tensors, {"version": self._version}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """Become what `save` described. Raises `WeightsMismatch`, with nothing changed."""
        named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        load_state(self.state(), named, complete=True)
        self._version = numbers["version"]

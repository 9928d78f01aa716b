"""An actor that is a torch module: acts where it is, batch by batch."""

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.workers.roles.simulator import Decision, Field, FloatArray, Observation

__all__ = ["Draws", "TorchActor"]


class Draws(Protocol):
    """What a `TorchActor` acts by."""

    def draw(
        self, observations: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(choices [B, ...], actions [B, C, A], logprobs [B]); `noise` is uniform."""


class TorchActor:
    """An `Actor` that follows the weights of a policy. `choice` has the chunk first."""

    noise: Literal["normal", "uniform"] = "uniform"
    light = False

    def __init__(self, policy: Draws, choice: Field, device: str = "cpu") -> None:
        self._policy, self._device = policy, device
        self.choice, self.chunk = choice, choice.shape[0]
        self.noise_size = int(np.prod(choice.shape))

    def act(self, observations: Observation, noise: FloatArray | None) -> Decision:
        """See `Actor`."""
        shown = {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
            for name, array in observations.items()
        }
        drawn = None
        if noise is not None:
            drawn = torch.from_numpy(np.ascontiguousarray(noise)).to(self._device)
        with torch.inference_mode():
            found = self._policy.draw(shown, drawn)
        choices, actions, logprobs = (tensor.cpu().numpy() for tensor in found)
        return Decision(choices, actions, logprobs)

    def weights(self) -> FloatArray:
        """See `Actor`: nothing is sent to the environments' processes."""
        return np.zeros(0, np.float32)

    def load(self, weights: FloatArray) -> None:
        """See `Actor`: it follows its policy by itself."""

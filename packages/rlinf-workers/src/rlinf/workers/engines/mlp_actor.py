"""The policy of an `MlpPolicy` in numpy: what an environment's process needs to act by itself."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlinf.workers.roles.simulator import Decision, Field, FloatArray, Observation

__all__ = ["MlpActor", "MlpSizes"]

BLOCK = 8
"""Rows that are multiplied at once. Always as many, so that what an environment is answered does
not depend on how many others are asked about with it: sums of another length round differently."""
LOG_ROOT_TWO_PI = 0.5 * float(np.log(2 * np.pi))


@dataclass(frozen=True, slots=True)
class MlpSizes:
    """Of a policy over state vectors.

    Attributes:
        inputs: Numbers of a state.
        low: Bounds of the numbers of an action.
        high: See `low`.
        hidden: Widths of the hidden layers, tanh after each.
        bins: 0: a Gaussian around the network's answer. Else each number of an action is a choice
            among so many values, evenly spread from low to high.
    """

    inputs: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    hidden: tuple[int, ...] = (64, 64)
    bins: int = 0

    @property
    def outputs(self) -> int:
        """Of the last layer."""
        return len(self.low) * max(1, self.bins)

    def values(self) -> FloatArray:
        """What the bins of each number of an action mean, float32 [A, bins]."""
        return np.linspace(self.low, self.high, self.bins, axis=1, dtype=np.float32)

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the actor's weights in order: matrix [in, out] and offset a layer; log of the std."""
        widths = [self.inputs, *self.hidden, self.outputs]
        layers = [s for a, b in itertools.pairwise(widths) for s in ((a, b), (b,))]
        return [*layers, *([] if self.bins else [(len(self.low),)])]


class MlpActor:
    """A light `Actor`."""

    chunk = 1
    light = True

    def __init__(self, sizes: MlpSizes, weights: FloatArray) -> None:
        count = len(sizes.low)
        self._sizes = sizes
        self.noise: Literal["normal", "uniform"] = "uniform" if sizes.bins else "normal"
        self.noise_size = count
        self.choice = Field((count,), "int16" if sizes.bins else "float32")
        self._values = sizes.values() if sizes.bins else None
        self.load(weights)

    def weights(self) -> FloatArray:
        """See `Actor`."""
        return self._flat

    def load(self, weights: FloatArray) -> None:
        """See `Actor`."""
        self._flat = np.array(weights, np.float32)
        self._layers, at = [], 0
        for shape in self._sizes.shapes():
            size = int(np.prod(shape))
            self._layers.append(self._flat[at : at + size].reshape(shape))
            at += size

    def act(self, observations: Observation, noise: FloatArray | None) -> Decision:
        """See `Actor`; reads `state`."""
        answer = self._answer(observations["state"])
        return self._bin(answer, noise) if self._sizes.bins else self._gaussian(answer, noise)

    def _answer(self, states: npt.NDArray[Any]) -> FloatArray:
        count = len(states)
        rows = np.zeros((-(-count // BLOCK), BLOCK, self._sizes.inputs), np.float32)
        rows.reshape(-1, self._sizes.inputs)[:count] = states
        depth = len(self._sizes.hidden) + 1
        answers = []
        for block in rows:
            for layer in range(depth):
                block = block @ self._layers[2 * layer]
                block += self._layers[2 * layer + 1]
                if layer < depth - 1:
                    np.tanh(block, out=block)
            answers.append(block)
        return np.concatenate(answers)[:count] if len(answers) > 1 else answers[0][:count]

    def _gaussian(self, mean: FloatArray, noise: FloatArray | None) -> Decision:
        log_std = self._layers[-1]
        drawn = np.zeros_like(mean) if noise is None else noise
        choices = (mean + np.exp(log_std) * drawn).astype(np.float32)
        logprobs = -0.5 * np.square(drawn).sum(1) - (log_std + LOG_ROOT_TWO_PI).sum()
        return Decision(choices, choices[:, None], logprobs.astype(np.float32))

    def _bin(self, answer: FloatArray, noise: FloatArray | None) -> Decision:
        count, size = len(answer), len(self._sizes.low)
        logits = answer.reshape(count, size, self._sizes.bins)
        logits = logits - logits.max(2, keepdims=True)
        mass = np.exp(logits)
        total = mass.sum(2, keepdims=True)
        if noise is None:
            choices = logits.argmax(2)
        else:
            reached = mass.cumsum(2) <= noise[..., None] * total
            choices = np.minimum(reached.sum(2), self._sizes.bins - 1)
        places = choices[..., None]
        logprobs = np.take_along_axis(logits - np.log(total), places, 2)[..., 0].sum(1)
        assert self._values is not None
        actions: FloatArray = np.take_along_axis(self._values[None], places, 2)[..., 0]
        return Decision(choices, actions[:, None], logprobs.astype(np.float32))

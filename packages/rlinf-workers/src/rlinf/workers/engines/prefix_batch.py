"""A batch of responses that share prompts, laid out so that nothing is computed twice.

The tokens of all prompts come first, each prompt once however many responses it has; then those of
all responses. There is no padding among them: only attention, which needs rectangles, lays them out
in padded ones (`Slots`). The last token of a response predicts nothing and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["PrefixBatch", "Rows", "Slots"]

IntArray = npt.NDArray[np.int32]
Rows = tuple[IntArray, IntArray, IntArray]
"""A prompt [P] with its responses [n, T] and their lengths [n] (each at least 1)."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Where flat tokens lie in a rectangle [rows, width].

    Attributes:
        rows: Number of rows.
        width: Length of the longest row.
        index: int64 [N], the place of each flat token in the flattened rectangle; None where the
            rectangle is full, so that the two are the same.
    """

    rows: int
    width: int
    index: Tensor | None

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], device: torch.device) -> "Slots":
        """The layout of rows with these lengths, each filled from the left."""
        rows, width = len(lengths), int(lengths.max(initial=0))
        if (lengths == width).all():
            return cls(rows, width, None)
        index = np.flatnonzero(np.arange(width) < lengths[:, None])
        return cls(rows, width, torch.from_numpy(index).to(device))

    def spread(self, flat: Tensor) -> Tensor:
        """[N, ...] -> [rows, width, ...]; unused places are 0."""
        if self.index is None:
            return flat.view(self.rows, self.width, *flat.shape[1:])
        wide = flat.new_zeros(self.rows * self.width, *flat.shape[1:])
        return wide.index_copy(0, self.index, flat).view(self.rows, self.width, *flat.shape[1:])

    def gather(self, wide: Tensor) -> Tensor:
        """[rows, width, ...] -> [N, ...], the inverse of `spread`."""
        flat = wide.reshape(self.rows * self.width, *wide.shape[2:])
        return flat if self.index is None else flat.index_select(0, self.index)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBatch:
    """Prompts, their responses, and how to find the prediction of each response token.

    Attributes:
        tokens: int64 [N], the prompts' tokens, then the responses' without their last ones.
        positions: int64 [N], the place of each token in its own sequence.
        prompts: Layout of the prompt tokens, one row a prompt.
        prompt_lengths: int64 [prompts].
        inputs: Layout of the response tokens that are inputs, one row a response.
        row_prompt: int64 [rows], the prompt of each response.
        uniform: Number of responses of each prompt where all have equally many, else 0.
        outputs: int64 [M], the tokens after which a response token is predicted: the last one of
            each prompt, then all inputs.
        source: int64 [R], for each response token the place in `outputs` that predicts it.
        targets: int64 [R], the response tokens.
        responses: Layout of the response tokens, one row a response.
    """

    tokens: Tensor
    positions: Tensor
    prompts: Slots
    prompt_lengths: Tensor
    inputs: Slots
    row_prompt: Tensor
    uniform: int
    outputs: Tensor
    source: Tensor
    targets: Tensor
    responses: Slots

    @property
    def row_token_count(self) -> int:
        """Tokens of all rows as if each carried its own prompt: the work without sharing."""
        return int(self.prompt_lengths[self.row_prompt].sum()) + len(self.targets)

    def predicting(self, wanted: Tensor) -> "PrefixBatch":
        """The batch reduced to the predictions of some response tokens, `wanted` bool [R].

        All tokens are read as before; only `outputs`, `source` and `targets` are fewer.
        """
        outputs, source = torch.unique(self.source[wanted], return_inverse=True)
        return replace(
            self, outputs=self.outputs[outputs], source=source, targets=self.targets[wanted]
        )

    @classmethod
    def of(cls, groups: Sequence[Rows], device: torch.device | str = "cpu") -> "PrefixBatch":
        """Lay out `groups`. A prompt without responses (n = 0) is only read."""
        place = torch.device(device)
        sizes = np.array([len(prompt) for prompt, _, _ in groups])
        counts = np.array([len(lengths) for _, _, lengths in groups])
        lengths = np.concatenate([lengths for _, _, lengths in groups]).astype(np.int64)
        row_prompt = np.repeat(np.arange(len(groups)), counts)
        targets = _flat([tokens for _, tokens, _ in groups], [n for _, _, n in groups])
        starts = np.cumsum(lengths) - lengths
        later = np.ones(len(targets), bool)
        later[starts] = False
        is_input = np.ones(len(targets), bool)
        is_input[starts + lengths - 1] = False
        within = np.arange(len(targets)) - np.repeat(starts, lengths)

        # The first token of a response is predicted by its prompt's last, the others by the inputs.
        source = np.repeat(row_prompt, lengths)
        source[later] = len(groups) + np.arange(int(later.sum()))
        prompt_tokens = np.concatenate([prompt for prompt, _, _ in groups])
        last = np.cumsum(sizes) - 1
        ahead = np.repeat(sizes[row_prompt], lengths)
        positions = [np.arange(size) for size in sizes] + [(ahead + within)[is_input]]
        inputs = len(prompt_tokens) + np.arange(int(is_input.sum()))

        def tensor(array: npt.NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(place)

        return cls(
            tokens=tensor(np.concatenate([prompt_tokens, targets[is_input]])),
            positions=tensor(np.concatenate(positions)),
            prompts=Slots.of(sizes, place),
            prompt_lengths=tensor(sizes),
            inputs=Slots.of(lengths - 1, place),
            row_prompt=tensor(row_prompt),
            uniform=int(counts[0]) if (counts == counts[0]).all() else 0,
            outputs=tensor(np.concatenate([last, inputs])),
            source=tensor(source),
            targets=tensor(targets),
            responses=Slots.of(lengths, place),
        )


def _flat(tokens: Sequence[IntArray], lengths: Sequence[IntArray]) -> IntArray:
    """All response tokens, one after the other."""
    rows = [
        wide[np.arange(wide.shape[1]) < long[:, None]]
        for wide, long in zip(tokens, lengths, strict=True)
    ]
    return np.concatenate(rows).astype(np.int32)

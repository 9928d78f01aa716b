"""Parameters that learn, laid end to end: one kernel for all of them, one message between ranks."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Buckets"]

NUMBERS = 1 << 24
"""Of a bucket; a larger parameter has one of its own."""

Member = tuple[int, nn.Parameter]


class Buckets:
    """Parameters and their gradients as views of a few flat tensors.

    What is done to a tensor costs as much for a bucket as for one bias. A bucket goes on where a
    part of the model (a vision tower, a language model) ends: what is reduced over ranks does not
    know of parts. But each part has slices of its own for an optimiser, since parts may learn at
    different times. For their modules the parameters stay what they are, except that nobody else
    may replace their memory or their gradients.

    Args:
        parts: The parameters of each part, in order.
        numbers: Of a bucket at most.

    Attributes:
        members: The parameters of each bucket.
        flat: Of each part, the slices of buckets that an optimiser steps over.
        gradients: The buckets of gradients.
    """

    def __init__(self, parts: Sequence[Iterable[nn.Parameter]], numbers: int = NUMBERS) -> None:
        cut = list(_cut([(index, p) for index, part in enumerate(parts) for p in part], numbers))
        self.members = [[p for _, p in bucket] for bucket in cut]
        self._values = [
            torch.cat([p.detach().flatten() for p in bucket]) for bucket in self.members
        ]
        self.gradients = [torch.zeros_like(values) for values in self._values]
        self.flat: list[list[nn.Parameter]] = [[] for _ in parts]
        self._slices: list[tuple[nn.Parameter, int, slice]] = []
        for number, bucket in enumerate(cut):
            end = 0
            for part, run in itertools.groupby(bucket, lambda member: member[0]):
                begin, end = end, end + sum(p.numel() for _, p in run)
                piece = nn.Parameter(self._values[number][begin:end])
                self.flat[part].append(piece)
                self._slices.append((piece, number, slice(begin, end)))
        self.attach()

    def clear(self) -> None:
        """Begin with no gradient; an optimiser may have let go of those of its slices."""
        for gradient in self.gradients:
            gradient.zero_()
        for piece, number, where in self._slices:
            piece.grad = self.gradients[number][where]

    def norm(self) -> Tensor:
        """That of all gradients together."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in self.gradients]
        return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)

    def attach(self) -> None:
        """Let everything lie in the buckets again, after these were moved."""
        for values, gradient, bucket in zip(
            self._values, self.gradients, self.members, strict=True
        ):
            sizes = [p.numel() for p in bucket]
            views = zip(torch.split(values, sizes), torch.split(gradient, sizes), strict=True)
            for parameter, (value, slope) in zip(bucket, views, strict=True):
                parameter.data = value.view(parameter.shape)
                parameter.grad = slope.view(parameter.shape)
        for piece, number, where in self._slices:
            piece.data = self._values[number][where]
            piece.grad = self.gradients[number][where]

    def tensors(self) -> Iterator[Tensor]:
        """What is to be moved."""
        yield from self._values
        yield from self.gradients


def _cut(members: Iterable[Member], numbers: int) -> Iterator[list[Member]]:
    """Runs of one dtype and device, of so many numbers at most."""
    run: list[Member] = []
    for member in members:
        parameter = member[1]
        if run:
            last, held = run[-1][1], sum(p.numel() for _, p in run)
            alike = (last.dtype, last.device) == (parameter.dtype, parameter.device)
            if not alike or held + parameter.numel() > numbers:
                yield run
                run = []
        run.append(member)
    if run:
        yield run

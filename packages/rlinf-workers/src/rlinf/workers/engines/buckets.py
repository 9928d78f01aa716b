"""Parameters that learn, laid end to end: one kernel for all of them, one message between ranks."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["Buckets"]

NUMBERS = 1 << 24
"""Of a bucket; a larger parameter has one of its own."""


class Buckets:
    """Parameters and their gradients as views of a few flat tensors.

    An optimiser steps over `flat` instead of the parameters: what is done to each tensor costs as
    much for a bucket as for one bias. Which part of a model a parameter belongs to does not matter,
    so several towers share buckets. For their modules the parameters stay what they are, except
    that nobody else may replace their memory or their gradients.

    Args:
        parameters: In order.
        numbers: Of a bucket at most.

    Attributes:
        flat: The buckets, each with a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], numbers: int = NUMBERS) -> None:
        self._members = list(_cut(parameters, numbers))
        self.flat = [
            nn.Parameter(torch.cat([p.detach().flatten() for p in members]))
            for members in self._members
        ]
        self._gradients = [torch.zeros_like(flat) for flat in self.flat]
        self.clear()
        self.attach()

    def clear(self) -> None:
        """Begin with no gradient."""
        for flat, gradient in zip(self.flat, self._gradients, strict=True):
            flat.grad = gradient.zero_()

    def attach(self) -> None:
        """Let the parameters lie in the buckets again, after these were moved."""
        for flat, gradient, members in zip(self.flat, self._gradients, self._members, strict=True):
            sizes = [p.numel() for p in members]
            values, slopes = torch.split(flat.detach(), sizes), torch.split(gradient, sizes)
            for parameter, value, slope in zip(members, values, slopes, strict=True):
                parameter.data = value.view(parameter.shape)
                parameter.grad = slope.view(parameter.shape)


def _cut(parameters: Iterable[nn.Parameter], numbers: int) -> Iterator[list[nn.Parameter]]:
    """Runs of one dtype and device, of so many numbers at most."""
    run: list[nn.Parameter] = []
    for parameter in parameters:
        alike = run and (run[0].dtype, run[0].device) == (parameter.dtype, parameter.device)
        if run and not (alike and sum(p.numel() for p in run) + parameter.numel() <= numbers):
            yield run
            run = []
        run.append(parameter)
    if run:
        yield run

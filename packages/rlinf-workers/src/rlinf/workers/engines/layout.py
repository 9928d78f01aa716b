"""How the tensors of one rank lie in those of the whole model, by the names of transformers.

A trainer that splits a model among ranks keeps its own tensors, under names of its own. For each of
them `Piece`s say which boxes of which whole tensors it holds. From that alone follow what is
published to a rollout, what a checkpoint holds, and how either is read back by any other number of
ranks, or by another engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.shards import Shard

__all__ = ["Piece", "check", "fill", "parts"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of a whole tensor, and where a rank has it.

    Attributes:
        local: Name of the rank's own tensor.
        whole: Name of the whole tensor.
        shape: Of the whole tensor.
        start: Where the box begins in it.
        size: Of the box.
        take: The box in the rank's own tensor: a view whose elements are in the order of the box's,
            in whatever shape.
        owned: This rank is the one to hand it out, of those that have the same box.
    """

    local: str
    whole: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    take: Callable[[Tensor], Tensor]
    owned: bool = True


def parts(pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """The boxes that this rank hands out, by the names of the whole tensors (views where possible).

    A number that belongs to a tensor (a step count) goes with the box at the tensor's beginning.
    `tensors` may have a part of the names only.
    """
    found = {}
    for piece in pieces:
        tensor = tensors.get(piece.local)
        if tensor is None or not piece.owned:
            continue
        if tensor.dim():
            values = piece.take(tensor.detach()).reshape(piece.size)
            found[piece.whole] = Shard(values, piece.shape, piece.start)
        elif not any(piece.start):
            # A file has no room for one number under the names of several boxes.
            found[piece.whole] = Shard(tensor.detach().clone(), (), ())
    return found


def check(
    shapes: Mapping[str, tuple[int, ...]], whole: Mapping[str, Tensor], *, complete: bool = True
) -> None:
    """Whether these are the tensors of a model with these shapes. Raises `WeightsMismatch`."""
    for name in shapes if complete else ():
        if name not in whole:
            raise WeightsMismatch(f"there are no values for the parameter {name}", name=name)
    for name, value in whole.items():
        if name not in shapes:
            raise WeightsMismatch(f"the model has no parameter {name}", name=name)
        if value.dim() and tuple(value.shape) != shapes[name]:
            text = f"{name} has the shape {shapes[name]}, not {tuple(value.shape)}"
            raise WeightsMismatch(text, name=name)


@torch.no_grad()
def fill(
    pieces: Sequence[Piece], tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> None:
    """Copy this rank's boxes of the whole tensors into its own ones, as far as both are given."""
    for piece in pieces:
        tensor, source = tensors.get(piece.local), whole.get(piece.whole)
        if tensor is None or source is None:
            continue
        if not tensor.dim():
            tensor.copy_(source)
            continue
        for axis, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
            source = source.narrow(axis, start, size)
        target = piece.take(tensor.detach())
        target.copy_(source.reshape(target.shape))

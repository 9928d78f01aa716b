"""The parameters of a module by name: reading them, loading others in place, moving them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rlinf.workers.errors import WorkerError

__all__ = ["WeightsMismatch", "load_state", "move", "nbytes", "state_of"]


class WeightsMismatch(WorkerError):
    """The weights given are not those of this model: a name or a shape differs."""

    FIELDS = ("name",)
    name: str | None


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, as views that later changes show through. Tied ones occur once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def load_state(
    targets: Mapping[str, Tensor], state: Mapping[str, Tensor], *, complete: bool = False
) -> None:
    """Copy `state` into the tensors of `targets`, converting dtype and device.

    All or nothing: names and shapes are checked before the first copy. `state` may hold a part of
    the names, unless it must be `complete`. Raises `WeightsMismatch`.
    """
    for name in targets if complete else ():
        if name not in state:
            raise WeightsMismatch(f"there are no values for the parameter {name}", name=name)
    for name, value in state.items():
        if name not in targets:
            raise WeightsMismatch(f"the model has no parameter {name}", name=name)
        if targets[name].shape != value.shape:
            have, given = tuple(targets[name].shape), tuple(value.shape)
            raise WeightsMismatch(f"{name} has the shape {have}, not {given}", name=name)
    with torch.no_grad():
        for name, value in state.items():
            targets[name].copy_(value)


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors to `device` in place: whoever holds them sees the new memory."""
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def nbytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of those tensors that lie on `device`."""
    return sum(t.nbytes for t in tensors if t.device == device)

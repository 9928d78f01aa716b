"""The parameters of a module: reading them by name, loading others in place, moving them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rlinf.workers.errors import WorkerError

__all__ = ["OneDevice", "Served", "WeightsMismatch", "load_state", "move", "nbytes", "state_of"]


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


class OneDevice(ABC):
    """The `Residency` of an engine that has all its tensors on one device while it works."""

    _device: torch.device

    @abstractmethod
    def _tensors(self) -> Iterable[Tensor]:
        """All that it holds: parameters, with their gradients, and what an optimiser keeps."""

    def onload(self) -> None:
        """Bring everything onto the device. See `Residency`."""
        move(self._tensors(), self._device)

    def offload(self) -> None:
        """Move it to host memory. See `Residency`."""
        move(self._tensors(), torch.device("cpu"))

    def resident_bytes(self) -> int:
        """Bytes of it on the device."""
        return nbytes(self._tensors(), self._device)


class Served(OneDevice):
    """A `WeightTarget` around a model that is given a policy's weights, from version 0."""

    _model: nn.Module
    _version = 0

    @property
    def version(self) -> int:
        """Version of the policy's weights that it has."""
        return self._version

    def state(self) -> Mapping[str, Tensor]:
        """The model's parameters by name, as they are now (not copies)."""
        return state_of(self._model)

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy a policy's weights into the model: all, or none with `WeightsMismatch`."""
        load_state(self.state(), state)
        self._version = version

    def _tensors(self) -> Iterable[Tensor]:
        return self._model.parameters()

"""Residency: an engine that can leave its device to another one and come back unchanged."""

from typing import Protocol, runtime_checkable

__all__ = ["Residency"]


@runtime_checkable
class Residency(Protocol):
    """What shares a device with others: the flow calls `onload` before work and `offload` after.

    After `offload` and `onload` everything that decides what the engine does next (parameters,
    optimiser state, random state) is bit-identical. Both may be called twice in a row.
    """

    def onload(self) -> None:
        """Bring everything onto the device."""

    def offload(self) -> None:
        """Free the device. Where the device is the CPU only caches are dropped."""

    def resident_bytes(self) -> int:
        """Bytes held on the device now."""

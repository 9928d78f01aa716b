"""Which accelerator this process computes on, by torch's own names for them."""

import importlib
from typing import Any

from rlinf.comm.device import Device


def local_device(index: int | None = None, torch: Any = None) -> Device:
    """The current device of `torch.accelerator`; the cpu where there is none.

    Imports torch, which may take seconds; a cpu where torch is not installed. "cuda" of a torch
    that is built for AMD is "rocm" here, as other libraries move its memory.

    Args:
        index: Another device than the current one.
        torch: For tests.
    """
    if torch is None:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return Device("cpu")
    accelerator = torch.accelerator
    if not accelerator.is_available():
        return Device("cpu")
    kind: str = accelerator.current_accelerator().type
    number: int = accelerator.current_device_index() if index is None else index
    if kind == "cuda" and getattr(torch.version, "hip", None):
        return Device("rocm", number, _uuid(torch, kind, number))
    return Device(kind, number, _uuid(torch, kind, number))


def _uuid(torch: Any, kind: str, index: int) -> str | None:
    """Tells physical devices apart, whatever each process sees of them; not all vendors have it."""
    properties = getattr(getattr(torch, kind, None), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(index), "uuid", None)
    return None if uuid is None else str(uuid)

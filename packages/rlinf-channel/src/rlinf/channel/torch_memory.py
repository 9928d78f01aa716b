"""Memory of torch devices: moves the tensors of an item between device, host and disk.

torch is imported when the first such item is looked at, and only where it is there already: an
item with a tensor in it comes from a program that has imported torch.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from rlinf.channel.cache import map_leaves


class TorchMemory:
    """See `Memory`. Host copies are pinned where the system can, so that they move fast."""

    def device_bytes(self, item: object) -> int:
        """Bytes of the tensors on a device, each counted as often as it occurs."""
        torch = _torch()
        if torch is None:
            return 0
        found = [0]

        def add(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                found[0] += leaf.numel() * leaf.element_size()
            return leaf

        map_leaves(item, add)
        return found[0]

    def free_bytes(self) -> int:
        """Free memory of the current CUDA device; 0 where there is none."""
        torch = _torch()
        if torch is None or not torch.cuda.is_available():
            return 0
        return int(torch.cuda.mem_get_info()[0])

    def own(self, item: object) -> object:
        """Clones of the tensors, detached from the graph; leaves of other kinds as they are."""
        torch = _torch()
        return map_leaves(item, lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x)

    def to_host(self, item: Any) -> Any:
        """Every device tensor as a `_Parked` one."""
        torch = _torch()

        def park(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type == "cpu":
                return leaf
            pinned = leaf.device.type == "cuda"
            copy = torch.empty_like(leaf, device="cpu", pin_memory=pinned)
            copy.copy_(leaf, non_blocking=pinned)
            if pinned:
                torch.cuda.current_stream(leaf.device).synchronize()
            return _Parked(copy, leaf.device)

        return map_leaves(item, park)

    def to_device(self, item: Any) -> Any:
        """Every parked tensor back where it was."""

        def fetch(leaf: Any) -> Any:
            if isinstance(leaf, _Parked):
                return leaf.tensor.to(leaf.device, non_blocking=True)
            return leaf

        return map_leaves(item, fetch)

    def to_disk(self, item: Any, path: Path) -> Any:
        """The parked item in a file; its path."""
        torch = _torch()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(item, path)
        return path

    def from_disk(self, item: Any) -> Any:
        """The item of a file, which is removed."""
        torch = _torch()
        loaded = torch.load(item, weights_only=False)  # written by this very process
        item.unlink()
        return loaded


class _Parked:
    """A tensor on the host that belongs on a device."""

    __slots__ = ("device", "tensor")

    def __init__(self, tensor: Any, device: Any) -> None:
        self.tensor = tensor
        self.device = device


def _torch() -> Any:
    """None: it is not in use. Waits for another thread that is in the middle of importing it."""
    return importlib.import_module("torch") if "torch" in sys.modules else None

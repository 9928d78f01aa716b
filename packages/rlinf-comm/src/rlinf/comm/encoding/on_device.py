"""OnDevice: the elements of a tensor that stay on their device, in the place of a buffer.

Whoever has a transport that moves device memory encodes with `kinds`, the kinds of device to
leave alone. What cannot be moved there after all is brought to the host (`to_host`).
"""

from typing import Any, Final

import numpy as np


class OnDevice:
    """One buffer on a device.

    Args:
        tensor: A flat uint8 torch tensor, the elements in C order.

    Attributes:
        nbytes: Its size.
        ready: An event on the stream that was current when the message was encoded (None on a
            device without streams): whoever reads on another stream waits for it.
    """

    __slots__ = ("nbytes", "ready", "tensor")
    readonly: Final = False
    obj: Final = None

    def __init__(self, tensor: Any, ready: Any = None) -> None:
        self.tensor = tensor
        self.nbytes: int = tensor.numel()
        self.ready = ready

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes on {self.tensor.device}>"

    def to_host(self) -> memoryview:
        """The same in host memory; waits for the device."""
        host: np.ndarray[Any, Any] = self.tensor.cpu().numpy()
        return host.data

    def copy(self) -> "OnDevice":
        """A copy on the device, ordered after what the current stream has under way."""
        tensor = self.tensor.clone()
        return OnDevice(tensor, mark(tensor))


def mark(tensor: Any) -> Any:
    """An event after all that the current stream of the tensor's device has to do; None on cpu."""
    if tensor.is_cpu:
        return None
    import importlib

    event = importlib.import_module("torch").Event(tensor.device.type)
    event.record()
    return event

"""empty: arrays and tensors in memory that a transport sends without a copy."""

import importlib
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlinf.comm.frame import allocate
from rlinf.comm.transports.base import Transport


def empty(transports: Iterable[Transport], shape: int | Sequence[int], dtype: object) -> Any:
    """An uninitialised array; a torch tensor where `dtype` is one of torch's.

    In ordinary memory where no transport has memory of its own, or it is full.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    torch: Any = importlib.import_module("torch") if "torch" in sys.modules else None
    if torch is not None and isinstance(dtype, torch.dtype):
        count = math.prod(sizes)
        memory = _memory(transports, count * dtype.itemsize)
        return (
            torch.frombuffer(memory, dtype=dtype, count=count).view(sizes)
            if count
            else (torch.empty(sizes, dtype=dtype))
        )
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    memory = _memory(transports, math.prod(sizes) * kind.itemsize)
    return np.frombuffer(memory, kind, math.prod(sizes)).reshape(sizes)


def _memory(transports: Iterable[Transport], nbytes: int) -> memoryview:
    for transport in transports if nbytes else ():
        memory = transport.allocate(nbytes)
        if memory is not None:
            return memory
    return allocate(nbytes)

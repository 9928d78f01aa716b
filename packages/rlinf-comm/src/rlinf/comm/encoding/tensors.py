"""torch tensors. torch is never imported to encode, and only where a tensor arrives to decode.

A tensor is sent as its values. `requires_grad` is kept for a leaf (a Parameter stays one); the
result of a computation arrives without it, because the graph stays behind. Layout is normalised
to C order. Tensors on a device come by way of the host and go to the same kind of device on the
other side where there is one, else they stay on the host. Subclasses (other than Parameter),
sparse and quantized tensors are pickled, whole storage and all. Where the transport can move memory
of the device (`Walk.kinds`), the elements stay there: see on_device.py; aliases among such tensors
(not the same tensor met twice) arrive apart.
"""

import functools
import importlib
from typing import Any, Final

import numpy as np

from rlinf.comm.encoding.arrays import bytes_of, share
from rlinf.comm.encoding.on_device import OnDevice, mark
from rlinf.comm.encoding.pickles import encode_pickled
from rlinf.comm.encoding.structure import DTYPES, FLAG_GRAD, FLAG_PARAMETER, NAMED_DTYPE, Op
from rlinf.comm.encoding.walk import Walk

# The dtype to look at the memory through, by element size.
_RAW: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


class Torch:
    """torch as far as the codec needs it, looked up once.

    Args:
        torch: The imported module.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.strided = torch.strided
        self.parameter = torch.nn.Parameter
        self.from_numpy = torch.from_numpy
        known = [(n, getattr(torch, name)) for n, name in enumerate(DTYPES) if hasattr(torch, name)]
        # Number of a dtype, and the one to look through at those that numpy does not know.
        self.known: dict[Any, tuple[int, Any]] = {
            dtype: (n, None if hasattr(np, DTYPES[n]) else self.same_size(dtype))
            for n, dtype in known
        }

    def same_size(self, dtype: Any) -> Any:
        """A dtype of the same size which numpy knows."""
        return getattr(self.torch, _RAW[dtype.itemsize])

    def look_up(self, walk: Walk, dtype: Any) -> tuple[int, Any]:
        """Number of a dtype (by name where it has none), and what to look at it through."""
        known = self.known.get(dtype)
        if known is None:
            return NAMED_DTYPE + walk.name(str(dtype)), self.same_size(dtype)
        return known

    def dtype(self, number: int, names: tuple[str, ...]) -> Any:
        """The dtype of a number in a program.

        Raises:
            ValueError: This torch has no such dtype.
        """
        name = names[number - NAMED_DTYPE] if number >= NAMED_DTYPE else f"torch.{DTYPES[number]}"
        dtype = getattr(self.torch, name.removeprefix("torch."), None)
        if not isinstance(dtype, self.torch.dtype):
            raise ValueError(f"torch {self.torch.__version__} has no dtype {name}")
        return dtype

    def view_dtype(self, dtype: Any) -> "tuple[np.dtype[Any], Any]":
        """The numpy dtype to build an array of, and the torch dtype to view it as (None: same)."""
        name = str(dtype).removeprefix("torch.")
        if hasattr(np, name) and name in DTYPES:
            return np.dtype(name), None
        return np.dtype(_RAW[dtype.itemsize]), dtype


@functools.cache
def torch_of() -> Torch:
    """What the codec needs of torch, which must be installed."""
    return Torch(importlib.import_module("torch"))


def loaded() -> Torch:
    """torch for a tensor that has arrived.

    Raises:
        ValueError: torch is not installed here.
    """
    try:
        return torch_of()
    except ImportError as error:
        raise ValueError(f"a torch tensor arrived, and torch cannot be imported: {error}") from None


def encode_tensor(walk: Walk, value: Any, depth: int) -> None:
    """A plain tensor or Parameter."""
    memo, key = walk.memo, id(value)
    number = memo.get(key)
    if number is not None:
        walk.program += (Op.REF, number)
        return
    torch = torch_of()
    flags = FLAG_PARAMETER if type(value) is torch.parameter else 0
    if walk.kinds and _leave(walk, value, torch, flags):
        return
    try:
        # The usual case first: numpy() raises where there is anything unusual about the tensor.
        number, raw = torch.known[value.dtype]
        if raw is None:
            host = value.numpy()
        elif value.requires_grad or value.is_neg():
            raise TypeError
        else:
            host = value.view(raw).numpy()
    except (KeyError, TypeError, RuntimeError):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            encode_pickled(walk, value, depth)
            return
        if not value.is_cpu:
            walk.program += (Op.DEVICE, walk.name(value.device.type))
        if value.requires_grad and value.is_leaf:
            flags |= FLAG_GRAD
        number, raw = torch.look_up(walk, value.dtype)
        host = _on_host(value.detach(), raw)
    shared = walk.windows is not None and share(walk, key)
    shape = host.shape
    walk.program += (Op.TENSOR, flags, number, len(shape))
    walk.numbers += shape
    if not shared:
        memory = bytes_of(host)
        walk.buffers.append(memory)
        walk.spans.append((value.data_ptr(), memory.nbytes))
    walk.arrays.append(value)
    memo[key] = walk.done
    walk.done += 1


def _leave(walk: Walk, value: Any, torch: Torch, flags: int) -> bool:
    """Write a tensor whose elements stay on their device; False: it is not such a one."""
    kind = value.device.type
    if kind not in walk.kinds or value.layout is not torch.strided or value.is_quantized:
        return False
    if value.numel() == 0:
        return False
    if value.requires_grad and value.is_leaf:
        flags |= FLAG_GRAD
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    number, _ = torch.look_up(walk, value.dtype)
    walk.program += (Op.DEVICE, walk.name(kind), Op.TENSOR, flags, number, value.ndim)
    walk.numbers += value.shape
    elements: Any = OnDevice(plain.view(-1).view(torch.torch.uint8), mark(plain))
    walk.buffers.append(elements)
    walk.keep.append(plain)
    walk.memo[id(value)] = walk.done
    walk.done += 1
    return True


def _on_host(value: Any, raw: Any) -> "np.ndarray[Any, Any]":
    """The elements of a detached tensor in host memory, as the dtype `raw` or their own."""
    value = value.resolve_conj().resolve_neg().cpu()
    host: np.ndarray[Any, Any] = (value if raw is None else value.contiguous().view(raw)).numpy()
    return host


def build(
    torch: Torch, memory: memoryview, shape: tuple[int, ...], kind: tuple[Any, Any, int]
) -> Any:
    """A tensor over received memory, which must be writable.

    Args:
        torch: The loaded torch.
        memory: Exactly its elements.
        shape: Its shape.
        kind: The numpy dtype to build, the torch dtype to view it as or None, the flags.
    """
    dtype, view, flags = kind
    value = torch.from_numpy(np.ndarray(shape, dtype, memory))
    if view is not None:
        value = value.view(view)
    if flags & FLAG_PARAMETER:
        value = torch.parameter(value, requires_grad=bool(flags & FLAG_GRAD))
    elif flags & FLAG_GRAD:
        value.requires_grad_(True)
    return value


def take_over(torch: Torch, buffer: OnDevice, shape: tuple[int, ...], kind: tuple[Any, int]) -> Any:
    """A tensor over device memory that has been received.

    Args:
        torch: The loaded torch.
        buffer: Exactly its elements.
        shape: Its shape.
        kind: Its dtype, and the flags.
    """
    dtype, flags = kind
    value = buffer.tensor.view(dtype).view(shape)
    if flags & FLAG_PARAMETER:
        return torch.parameter(value, requires_grad=bool(flags & FLAG_GRAD))
    return value.requires_grad_() if flags & FLAG_GRAD else value


def move(torch: Torch, value: Any, kind: str) -> Any:
    """To the device of this kind where this side has one, keeping the flags."""
    backend = getattr(torch.torch, kind, None)
    if backend is None or not getattr(backend, "is_available", bool)():
        return value
    moved = value.detach().to(kind)
    if type(value) is torch.parameter:
        return torch.parameter(moved, requires_grad=value.requires_grad)
    return moved.requires_grad_(value.requires_grad)

"""How arrays, tensors and parcels are built again, over the received memory."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf.comm.encoding import tensors
from rlinf.comm.encoding.arrays import dtype_number, namespace
from rlinf.comm.encoding.on_device import OnDevice
from rlinf.comm.encoding.parcel import Parcel
from rlinf.comm.encoding.readers import list_of
from rlinf.comm.encoding.structure import Op
from rlinf.comm.encoding.template import COMPILERS, Malformed, Parser, Reader, Values

Take = Callable[[Values, int, bool], memoryview]


def take_next(values: Values, size: int, write: bool) -> memoryview:
    """The next buffer, which must be of this size."""
    memory = values.take()
    if memory.nbytes != size:
        raise Malformed(f"an array of {size} bytes in a buffer of {memory.nbytes}")
    return values.writable(values.at - 1) if write and memory.readonly else memory


def take_window(values: Values, size: int, write: bool) -> memoryview:
    """A part of a buffer which is another array's."""
    at, offset = values.window
    if not 0 <= at < len(values.buffers) or not 0 <= offset <= values.buffers[at].nbytes - size:
        raise Malformed(f"a window of {size} bytes at {offset} of buffer {at}")
    memory = values.writable(at) if write else values.buffers[at]
    return memory[offset : offset + size]


def compile_array(parser: Parser, depth: int, path: str, take: Take = take_next) -> Reader:
    """A numpy array: a view, read-only where the memory is."""
    dtype, ndim = dtype_number(parser.next(), parser.names), parser.next()
    itemsize, array, prod = dtype.itemsize, np.ndarray, math.prod

    def read(values: Values) -> "np.ndarray[Any, Any]":
        shape = values.shape(ndim)
        return array(shape, dtype, take(values, prod(shape) * itemsize, False))

    def read_vector(values: Values) -> "np.ndarray[Any, Any]":
        at = values.at
        memory, values.at = values.buffers[at], at + 1
        length = next(values.numbers)
        if memory.nbytes != length * itemsize:
            raise Malformed(f"{length} items of {itemsize} bytes in {memory.nbytes} bytes")
        return array(length, dtype, memory)

    return read_vector if ndim == 1 and take is take_next else read


def compile_scalar(parser: Parser, depth: int, path: str) -> Reader:
    """A numpy scalar."""
    dtype = dtype_number(parser.next(), parser.names)

    def read(values: Values) -> Any:
        blob = next(values.blobs)
        if len(blob) != dtype.itemsize:
            raise Malformed(f"a {dtype} of {len(blob)} bytes")
        return np.ndarray((), dtype, blob).copy()[()]

    return read


def compile_objects(parser: Parser, depth: int, path: str) -> Reader:
    """A numpy array of objects."""
    ndim = parser.next()
    items = list_of(parser, depth, path)

    def read(values: Values) -> "np.ndarray[Any, Any]":
        shape = values.shape(ndim)
        found = items(values)
        if math.prod(shape) != len(found):
            raise Malformed(f"{len(found)} objects in an array of {shape}")
        flat = np.empty(len(found), object)
        for index, item in enumerate(found):
            flat[index] = item
        return flat.reshape(shape)

    return read


def compile_tensor(parser: Parser, depth: int, path: str, take: Take = take_next) -> Reader:
    """A torch tensor: a view where the memory is writable, else over a private copy."""
    flags, number, ndim = parser.next(), parser.next(), parser.next()
    torch = tensors.loaded()
    dtype, view = torch.view_dtype(torch.dtype(number, parser.names))
    kind = (dtype, view, flags)
    itemsize, build = dtype.itemsize, tensors.build

    def read(values: Values) -> Any:
        shape = values.shape(ndim)
        memory = take(values, math.prod(shape) * itemsize, True)
        return build(torch, memory, shape, kind)

    return read


def compile_device(parser: Parser, depth: int, path: str) -> Reader:
    """A tensor that was on a device."""
    name = parser.name()
    if parser.next() != Op.TENSOR:
        raise Malformed("something else than a tensor on a device")
    flags, number, ndim = parser.next(), parser.next(), parser.next()
    torch = tensors.loaded()
    dtype = torch.dtype(number, parser.names)
    host_dtype, view = torch.view_dtype(dtype)

    def read(values: Values) -> Any:
        shape = values.shape(ndim)
        size = math.prod(shape) * dtype.itemsize
        memory = take_next(values, size, True)
        if isinstance(memory, OnDevice):
            return tensors.take_over(torch, memory, shape, (dtype, flags))
        host = tensors.build(torch, memory, shape, (host_dtype, view, flags))
        return tensors.move(torch, host, name)

    return read


def compile_foreign(parser: Parser, depth: int, path: str) -> Reader:
    """An array of another library."""
    make = namespace(parser.name(), parser.allow_pickle)
    if parser.next() != Op.ARRAY:
        raise Malformed("a foreign array of something else than numpy's")
    host = compile_array(parser, depth, path)
    return lambda values: make(host(values))


def compile_window(parser: Parser, depth: int, path: str) -> Reader:
    """An array or tensor in another one's memory."""
    op = parser.next()
    if op not in (Op.ARRAY, Op.TENSOR):
        raise Malformed(f"operation {op} in a window")
    inside = (compile_array if op == Op.ARRAY else compile_tensor)(parser, depth, path, take_window)

    def read(values: Values) -> Any:
        values.window = (next(values.numbers), next(values.numbers))
        return inside(values)

    return read


def compile_parcel(parser: Parser, depth: int, path: str) -> Reader:
    """A parcel, still closed."""

    def read(values: Values) -> Parcel:
        count, header = values.count(), next(values.blobs)
        if count > len(values.buffers) - values.at:
            raise Malformed(f"a parcel of {count} buffers")
        return Parcel(header, tuple(values.take() for _ in range(count)))

    return read


COMPILERS.update(
    {
        Op.SCALAR: compile_scalar,
        Op.ARRAY: compile_array,
        Op.OBJECTS: compile_objects,
        Op.TENSOR: compile_tensor,
        Op.DEVICE: compile_device,
        Op.FOREIGN: compile_foreign,
        Op.WINDOW: compile_window,
        Op.PARCEL: compile_parcel,
    }
)

"""Coded: an array that travels in a codec's form, and arrives as an ordinary array.

A codec is a plug-in by the entry point `rlinf.codecs`; the value is an object with these methods,
or a class that makes one. Both sides need it.
"""

import functools
import importlib.metadata
import math
from typing import Any, Final, Protocol

import numpy as np

from rlinf.comm.encoding.arrays import dtype_number, write_array
from rlinf.comm.encoding.structure import Op
from rlinf.comm.encoding.template import COMPILERS, Malformed, Parser, Reader, Values
from rlinf.comm.encoding.walk import Refused, Walk

GROUP: Final = "rlinf.codecs"
MOST_TIMES: Final = 4096
"""How many times its size an encoding may grow to; a sender that means harm is not let further."""


class ArrayCodec(Protocol):
    """A reversible encoding of arrays."""

    def encode(self, array: "np.ndarray[Any, Any]") -> bytes:
        """The array's bytes in another form; shape and dtype travel beside it."""

    def decode(
        self, data: memoryview, shape: tuple[int, ...], dtype: "np.dtype[Any]"
    ) -> "np.ndarray[Any, Any]":
        """The array that `encode` was given.

        Raises:
            ValueError: The data is no encoding of such an array.
        """


class Coded:
    """An array to be sent through a codec: `endpoint.send({"frames": Coded(frames, "patches")})`.

    Args:
        array: A numpy array.
        codec: Name of the codec.
    """

    __slots__ = ("array", "codec")

    def __init__(self, array: "np.ndarray[Any, Any]", codec: str) -> None:
        self.array: Final = array
        self.codec: Final = codec


@functools.cache
def codec_named(name: str) -> ArrayCodec:
    """A codec that is installed.

    Raises:
        ValueError: It is not.
    """
    points = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise ValueError(f"no codec {name!r} is installed here; there are {known}")
    found: Any = points[name].load()
    codec: ArrayCodec = found() if isinstance(found, type) else found
    return codec


def encode_coded(walk: Walk, value: Coded, depth: int) -> None:
    """Encode an array with its codec."""
    if walk.enter(value, depth):
        array = value.array
        try:
            if array.dtype.hasobject:
                raise ValueError(f"an array of {array.dtype} has no bytes to encode")
            data = codec_named(value.codec).encode(array)
        except ValueError as error:
            raise Refused(value, str(error)) from error
        walk.program += (Op.CODED, walk.name(value.codec))
        write_array(walk, array)
        walk.buffers.append(memoryview(data).cast("B"))
        walk.leave(value)


def compile_coded(parser: Parser, depth: int, path: str) -> Reader:
    """An array from its encoding."""
    codec = codec_named(parser.name())
    if parser.next() != Op.ARRAY:
        raise Malformed("an encoding of something else than an array")
    dtype, ndim = dtype_number(parser.next(), parser.names), parser.next()

    def read(values: Values) -> "np.ndarray[Any, Any]":
        shape = values.shape(ndim)
        data = values.take()
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or size > MOST_TIMES * (data.nbytes + 16):
            raise Malformed(f"an array of {shape} from {data.nbytes} bytes")
        array = codec.decode(data, shape, dtype)
        if array.shape != shape or array.dtype != dtype:
            raise Malformed(f"a codec that gives {array.shape} instead of {shape}")
        return array

    return read


COMPILERS[Op.CODED] = compile_coded

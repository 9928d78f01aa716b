"""A large numpy array that is the whole message.

Its header depends on dtype and shape alone, so it is made, and understood, once for all such
arrays: the rest of them go past the codec's walk.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from rlinf.comm.encoding.arrays import is_numbered

LARGE_BYTES: Final = 1 << 16
KEPT: Final = 1024
"""How many headers are remembered."""

Shape = tuple[int, ...]

_headers: dict[tuple[np.dtype[Any], Shape], bytes] = {}
_kinds: dict[bytes, tuple[Shape, np.dtype[Any], int]] = {}


def is_lone(value: object) -> TypeGuard["np.ndarray[Any, Any]"]:
    """Whether an object is such an array."""
    return type(value) is np.ndarray and value.nbytes >= LARGE_BYTES and is_numbered(value.dtype)


def header_of(value: "np.ndarray[Any, Any]") -> bytes | None:
    """The header of an array like this one; None if there was none before."""
    return _headers.get((value.dtype, value.shape))


def learn(value: "np.ndarray[Any, Any]", header: bytes) -> None:
    """The codec has given this array this header."""
    if len(_headers) >= KEPT:
        _headers.clear()
        _kinds.clear()
    _headers[value.dtype, value.shape] = header
    _kinds[header] = value.shape, value.dtype, value.nbytes


def array_of(header: bytes, buffers: Sequence[Any]) -> "np.ndarray[Any, Any] | None":
    """The array in a message, a view on its buffer; None where the codec has to look."""
    kind = _kinds.get(header) if type(header) is bytes else None
    if kind is None or len(buffers) != 1:
        return None
    shape, dtype, nbytes = kind
    memory = buffers[0]
    fits = type(memory) is memoryview and memory.nbytes == nbytes and memory.format == "B"
    return np.ndarray(shape, dtype, memory) if fits else None

"""Leaves the codec does not know: cloudpickle, protocol 5, with arrays and buffers lifted out.

A pickle is code, and is read only from authenticated peers. Its checksum catches accidents before
the unpickler sees them; it is no defence against a peer that means harm.
"""

import io
import pickle
import sys
import zlib
from collections.abc import Iterable
from typing import Any, Final

import cloudpickle

from rlinf.comm.encoding.structure import INLINE_BYTES, Op
from rlinf.comm.encoding.walk import ENCODERS, Encoder, Refused, Walk


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one leaf; what the codec encodes better stays outside and is referred to.

    Attributes:
        lifted: The objects left outside, to be encoded as children.
        outside: Buffers that classes with protocol 5 support gave out of band.
    """

    def __init__(self, file: io.BytesIO, root: object) -> None:
        self.outside: list[pickle.PickleBuffer] = []
        super().__init__(file, protocol=5, buffer_callback=self.outside.append)
        self.lifted: list[object] = []
        self._root = root
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The number of a lifted object; None: pickle it."""
        kind = type(value)
        if ENCODERS[kind] not in LIFTED and (kind is not bytes or len(value) <= INLINE_BYTES):
            return None
        if value is self._root:
            return None
        number = self._numbers.setdefault(id(value), len(self.lifted))
        if number == len(self.lifted):
            self.lifted.append(value)
        return number


LIFTED: Final[set[Encoder]] = set()
"""Encoders of what is encoded, not pickled, inside a pickled object; classify.py fills it."""


class Unpickler(pickle.Unpickler):
    """Reads one leaf."""

    def __init__(self, blob: bytes, lifted: list[object], outside: Iterable[memoryview]) -> None:
        super().__init__(io.BytesIO(blob), buffers=outside)
        self._lifted = lifted

    def persistent_load(self, number: Any) -> object:
        """What `Pickler.persistent_id` left outside."""
        if type(number) is not int or not 0 <= number < len(self._lifted):
            raise pickle.UnpicklingError(f"no lifted object {number!r}")
        return self._lifted[number]

    def find_class(self, module: str, name: str) -> Any:
        """A spawned child's main module is its parent's `__main__`."""
        if module == "__mp_main__" and module not in sys.modules:
            module = "__main__"
        return super().find_class(module, name)


def encode_pickled(walk: Walk, value: object, depth: int) -> None:
    """Any object that cloudpickle can take."""
    if not walk.allow_pickle:
        raise Refused(value, f"a {type(value).__qualname__} needs pickling, which is off")
    if not walk.enter(value, depth):
        return
    file = io.BytesIO()
    pickler = Pickler(file, value)
    try:
        pickler.dump(value)
        outside = [memoryview(buffer.raw()) for buffer in pickler.outside]
    except RecursionError:
        raise Refused(value, "nested too deeply to pickle") from None
    except Exception as error:  # the object's own __reduce__ runs here, and raises what it likes
        raise Refused(value, f"cannot be pickled: {error}") from error
    blob = file.getvalue()
    walk.keep.append(pickler.lifted)
    walk.program += (Op.PICKLE, len(pickler.lifted))
    walk.numbers += (zlib.crc32(blob), len(outside))
    walk.blobs.append(blob)
    walk.buffers += outside
    for item in pickler.lifted:
        ENCODERS[type(item)](walk, item, depth + 1)
    walk.leave(value)


def unpickle(
    blob: bytes, crc: int, lifted: list[object], outside: Iterable[memoryview] = ()
) -> Any:
    """Read a leaf back.

    Raises:
        ValueError: The checksum does not fit, or unpickling failed; the message says how.
    """
    if zlib.crc32(blob) != crc:
        raise ValueError("the checksum of a pickled object does not fit")
    try:
        return Unpickler(blob, lifted, outside).load()
    except Exception as error:  # the classes' own code runs here, and raises what it likes
        name = type(error).__name__
        raise ValueError(f"a pickled object cannot be rebuilt here: {name}: {error}") from error

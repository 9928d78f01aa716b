"""Template: a structure made ready to build objects from values, again and again.

A reader is a function that takes its values from a `Values` and returns the object. Compiling
checks all that can be checked without the values.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from google.protobuf.message import DecodeError

from rlinf.comm.encoding.structure import MAX_DEPTH, Op
from rlinf.comm.errors import CodecError
from rlinf.comm.proto.message_pb2 import Header, Structure

CACHED_BYTES: Final = 1 << 20
"""How many bytes of structures are kept compiled."""


EXHAUSTED: Final[Iterator[Any]] = iter(())
LISTS: Final = {field.number: field.name for field in Header.DESCRIPTOR.fields if field.is_repeated}


class Malformed(Exception):
    """The message is no encoding of anything."""


class Values:
    """The values of one message, and how far they are used up.

    Attributes:
        buffers: All buffers of the message.
        at: The next buffer.
        done: Finished objects, where the structure has references to them.
        window: Buffer and offset of the window being read.
    """

    __slots__ = ("at", "blobs", "buffers", "done", "numbers", "reals", "texts", "window")

    def __init__(self, header: Header, buffers: list[memoryview]) -> None:
        self.numbers: Iterator[int] = EXHAUSTED
        self.reals: Iterator[float] = EXHAUSTED
        self.texts: Iterator[str] = EXHAUSTED
        self.blobs: Iterator[bytes] = EXHAUSTED
        for field, items in header.ListFields():
            if field.number in LISTS:
                setattr(self, LISTS[field.number], iter(items[:]))
        self.buffers = buffers
        self.at = 0
        self.done: list[object] = []
        self.window = (0, 0)

    def take(self) -> memoryview:
        """The next buffer."""
        at = self.at
        if at >= len(self.buffers):
            raise Malformed(f"there are only {at} buffers")
        self.at = at + 1
        return self.buffers[at]

    def count(self) -> int:
        """The next number, which must not be negative."""
        number = next(self.numbers)
        if number < 0:
            raise Malformed(f"a length of {number}")
        return number

    def shape(self, ndim: int) -> tuple[int, ...]:
        """The next shape; numpy will check that nothing in it is negative."""
        shape = tuple(islice(self.numbers, ndim))
        if len(shape) != ndim:
            raise Malformed(f"a shape of {shape} in {ndim} dimensions")
        return shape

    def writable(self, at: int) -> memoryview:
        """Buffer `at` to be written to: a private copy of it, made once, if it is read-only."""
        memory = self.buffers[at]
        if memory.readonly:
            memory = self.buffers[at] = memoryview(bytearray(memory))
        return memory

    def finish(self) -> None:
        """Check that everything was used."""
        if self.at != len(self.buffers):
            raise Malformed(f"{len(self.buffers)} buffers for {self.at}")
        for values in (self.numbers, self.reals, self.texts, self.blobs):
            if next(values, None) is not None:
                raise Malformed("more values than the structure has places for")


Reader = Callable[[Values], Any]


class Parser:
    """Reads a program into readers.

    Attributes:
        structure: The message, for its classes and keys.
        names: Its names.
        allow_pickle: Whether pickled leaves are accepted.
        registering: Whether finished objects are kept for references.
    """

    def __init__(self, structure: Structure, allow_pickle: bool, registering: bool) -> None:
        self.structure = structure
        self.names = tuple(structure.names)
        self.allow_pickle = allow_pickle
        self.registering = registering
        self.referring = False
        self.hashed = False
        self._program = iter(structure.program[:])

    def next(self) -> int:
        """The next operation or argument."""
        return next(self._program)

    def name(self) -> str:
        """The name that the next argument points to."""
        return self.names[self.next()]

    def node(self, depth: int, path: str) -> Reader:
        """The reader of the next object."""
        if depth > MAX_DEPTH + 4:
            raise Malformed(f"deeper than {MAX_DEPTH} levels at {path[:200]}")
        op = self.next()
        compiler = COMPILERS.get(op)
        if compiler is None:
            raise Malformed(f"no operation {op}")
        reader = compiler(self, depth, path)
        return register(reader) if self.registering and op in REGISTERED else reader

    def end(self) -> None:
        """Check that the program is over."""
        if next(self._program, None) is not None:
            raise Malformed("the program goes on after its object")


Compiler = Callable[[Parser, int, str], Reader]

COMPILERS: Final[dict[int, Compiler]] = {}
"""By operation; filled by readers.py."""

REGISTERED: Final = frozenset(
    {
        Op.LONG_TEXT, Op.LONG_BYTES, Op.BYTEARRAY, Op.MEMORYVIEW, Op.LIST, Op.INTS, Op.REALS,
        Op.BOOLS, Op.TEXTS, Op.TUPLE, Op.SET, Op.FROZENSET, Op.DICT, Op.MAPPING, Op.ORDERED,
        Op.RECORD, Op.NAMED, Op.ARRAY, Op.OBJECTS, Op.TENSOR, Op.DEVICE, Op.FOREIGN, Op.WINDOW,
        Op.PARCEL, Op.PICKLE, Op.SHORTS, Op.LONGS, Op.CODED,
    }
)  # fmt: skip
"""Operations whose objects count as finished ones, in the order in which they end."""


def register(reader: Reader) -> Reader:
    """A reader that also keeps its object for references."""

    def read(values: Values) -> Any:
        value = reader(values)
        values.done.append(value)
        return value

    return read


def compile_structure(data: bytes, allow_pickle: bool) -> Reader:
    """The reader of a serialised structure, from the cache if it was there before.

    Raises:
        CodecError: It is malformed, or has a pickled leaf and `allow_pickle` is off.
    """
    cache = _caches[allow_pickle]
    reader = cache.get(data)
    if reader is None:
        reader = _compile(data, allow_pickle)
        if len(data) <= CACHED_BYTES // 16:
            cache.put(data, reader)
    return reader


def _compile(data: bytes, allow_pickle: bool) -> Reader:
    try:
        structure = Structure.FromString(data)
        parser = Parser(structure, allow_pickle, registering=False)
        reader = parser.node(0, "$")
        parser.end()
        if parser.referring:
            reader = Parser(structure, allow_pickle, registering=True).node(0, "$")
    except StopIteration:
        raise CodecError("malformed message: its program ends in the middle") from None
    except (
        Malformed, DecodeError, ArithmeticError, LookupError, NotImplementedError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        raise CodecError(f"malformed message: {error}") from error
    return reader


class Cache:
    """Compiled structures by their bytes, emptied when they have grown too many."""

    def __init__(self) -> None:
        self._readers: dict[bytes, Reader] = {}
        self._nbytes = 0

    def get(self, data: bytes) -> Reader | None:
        """The reader, if it is there."""
        return self._readers.get(data)

    def put(self, data: bytes, reader: Reader) -> None:
        """Keep a reader."""
        self._nbytes += len(data) + 64
        if self._nbytes > CACHED_BYTES:
            self._readers = {}
            self._nbytes = len(data) + 64
        self._readers[data] = reader


_caches: Final = {True: Cache(), False: Cache()}

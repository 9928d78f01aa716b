"""How plain values and containers are built again: the counterpart of plain.py and classes.py."""

import enum
from collections import OrderedDict
from itertools import islice
from typing import Any

import numpy as np

from rlinf.comm.encoding.classes import has_dict, resolve
from rlinf.comm.encoding.path import step_of
from rlinf.comm.encoding.pickles import unpickle
from rlinf.comm.encoding.structure import CODES, Op
from rlinf.comm.encoding.template import COMPILERS, Malformed, Parser, Reader, Values

_LISTS = frozenset({Op.LIST, Op.INTS, Op.REALS, Op.BOOLS, Op.TEXTS, Op.SHORTS, Op.LONGS})


def read_none(values: Values) -> None:
    """None."""


def read_bool(values: Values) -> bool:
    """A bool."""
    return bool(next(values.numbers))


def read_int(values: Values) -> int:
    """An int of 64 bits."""
    return next(values.numbers)


def read_big_int(values: Values) -> int:
    """An int of more bits."""
    return int.from_bytes(next(values.blobs), "little", signed=True)


def read_real(values: Values) -> float:
    """A float."""
    return next(values.reals)


def read_complex(values: Values) -> complex:
    """A complex."""
    return complex(next(values.reals), next(values.reals))


def read_text(values: Values) -> str:
    """A string."""
    return next(values.texts)


def read_wide_text(values: Values) -> str:
    """A string with lone surrogates."""
    return next(values.blobs).decode("utf-8", "surrogatepass")


def read_long_text(values: Values) -> str:
    """A string from a buffer, copied."""
    return str(values.take(), "utf-8", "surrogatepass")


def read_bytes(values: Values) -> bytes:
    """A few bytes."""
    return next(values.blobs)


def read_long_bytes(values: Values) -> bytes:
    """Bytes from a buffer, copied."""
    return bytes(values.take())


def read_bytearray(values: Values) -> bytearray:
    """A bytearray from a buffer, copied."""
    return bytearray(values.take())


def read_ints(values: Values) -> list[int]:
    """A list of ints."""
    return _exactly(list(islice(values.numbers, count := values.count())), count)


def read_bools(values: Values) -> list[bool]:
    """A list of bools."""
    return _exactly(list(map(bool, islice(values.numbers, count := values.count()))), count)


def read_reals(values: Values) -> list[float]:
    """A list of floats."""
    return _exactly(list(islice(values.reals, count := values.count())), count)


def read_texts(values: Values) -> list[str]:
    """A list of strings."""
    return _exactly(list(islice(values.texts, count := values.count())), count)


def _exactly(items: list[Any], count: int) -> list[Any]:
    if len(items) != count:
        raise Malformed(f"a list of {count} has {len(items)} items")
    return items


def compile_shorts(parser: Parser, depth: int, path: str) -> Reader:
    """A list of machine numbers from a blob."""
    code = CODES[parser.next()]
    return lambda values: _numbers(code, values.count(), next(values.blobs))


def compile_longs(parser: Parser, depth: int, path: str) -> Reader:
    """A list of machine numbers from a buffer."""
    code = CODES[parser.next()]
    return lambda values: _numbers(code, values.count(), values.take())


def _numbers(code: str, count: int, data: bytes | memoryview) -> list[Any]:
    numbers: list[Any] = memoryview(data).cast(code).tolist()  # type: ignore[call-overload]
    return _exactly(numbers, count)


def compile_bytearray(parser: Parser, depth: int, path: str) -> Reader:
    """See `read_bytearray`."""
    if parser.next() != Op.LONG_BYTES:
        raise Malformed("a bytearray of something else than bytes")
    return read_bytearray


def compile_memoryview(parser: Parser, depth: int, path: str) -> Reader:
    """A view of the received memory."""
    code, ndim = parser.name(), parser.next()
    memoryview(bytes(16)).cast(code)  # type: ignore[call-overload]  # says if there is no such code

    def read(values: Values) -> memoryview:
        shape = values.shape(ndim)
        memory = values.take()
        try:
            if memory.nbytes == 0 and 0 in shape:
                return np.ndarray(shape, code).data  # cast cannot make these
            return memory.cast(code, shape)  # type: ignore[call-overload,no-any-return]
        except TypeError as error:
            raise Malformed(f"a memoryview of {shape}: {error}") from None

    return read


def compile_list(parser: Parser, depth: int, path: str) -> Reader:
    """A list of anything."""
    count = parser.next()
    readers: list[Reader] = []
    for index in range(count):
        readers.append(parser.node(depth + 1, f"{path}[{index}]"))

    def read(values: Values) -> list[Any]:
        return [reader(values) for reader in readers]

    return read


def list_of(parser: Parser, depth: int, path: str) -> Reader:
    """The list that another container is made from."""
    op = parser.next()
    if op not in _LISTS:
        raise Malformed(f"operation {op} where a list should be")
    return COMPILERS[op](parser, depth, path)


def compile_tuple(parser: Parser, depth: int, path: str) -> Reader:
    """A tuple."""
    items = list_of(parser, depth, path)
    return lambda values: tuple(items(values))


def compile_set(parser: Parser, depth: int, path: str) -> Reader:
    """A set."""
    items = hashed(parser, depth, path)
    return lambda values: set(items(values))


def compile_frozenset(parser: Parser, depth: int, path: str) -> Reader:
    """A frozenset."""
    items = hashed(parser, depth, path)
    return lambda values: frozenset(items(values))


def hashed(parser: Parser, depth: int, path: str) -> Reader:
    """A list of what will be hashed; no references in it, see `Forgetful`."""
    outer, parser.hashed = parser.hashed, True
    items = list_of(parser, depth, f"{path}{{}}")
    parser.hashed = outer
    return items


def compile_dict(parser: Parser, depth: int, path: str) -> Reader:
    """A dict with string keys."""
    keys = tuple(parser.structure.keys[parser.next()].keys)
    pairs = [(key, parser.node(depth + 1, path + step_of(key))) for key in keys]

    def read(values: Values) -> dict[str, Any]:
        return {key: reader(values) for key, reader in pairs}

    return read


def compile_mapping(parser: Parser, depth: int, path: str) -> Reader:
    """A dict with any keys."""
    keys = hashed(parser, depth, path)
    items = list_of(parser, depth, path)

    def read(values: Values) -> dict[Any, Any]:
        found = keys(values)
        try:
            return dict(zip(found, items(values), strict=True))
        except ValueError as error:
            raise Malformed(f"keys and values of a dict: {error}") from None

    return read


def compile_ordered(parser: Parser, depth: int, path: str) -> Reader:
    """An OrderedDict with its attributes."""
    op = parser.next()
    if op not in (Op.DICT, Op.MAPPING):
        raise Malformed(f"operation {op} where a dict should be")
    pairs = COMPILERS[op](parser, depth, path)
    attributes = parser.node(depth + 1, path)

    def read(values: Values) -> OrderedDict[Any, Any]:
        value = OrderedDict(pairs(values))
        extra = attributes(values)
        if extra is not None:
            if type(extra) is not dict or not all(type(key) is str for key in extra):
                raise Malformed("attributes that are no attributes")
            vars(value).update(extra)
        return value

    return read


def compile_record(parser: Parser, depth: int, path: str) -> Reader:
    """A dataclass instance; its `__init__` does not run."""
    message = parser.structure.classes[parser.next()]
    kind = resolve(message, parser.allow_pickle)
    fields = [(name, parser.node(depth + 1, f"{path}.{name}")) for name in message.fields]
    if issubclass(kind, (tuple, enum.Enum)):
        raise Malformed(f"{message.path} is no dataclass")
    new = object.__new__
    if has_dict(kind):

        def read(values: Values) -> Any:
            value = new(kind)
            state = value.__dict__
            for name, reader in fields:
                state[name] = reader(values)
            return value

        return read
    put = object.__setattr__

    def read_slots(values: Values) -> Any:
        value = new(kind)
        for name, reader in fields:
            put(value, name, reader(values))
        return value

    return read_slots


def compile_named(parser: Parser, depth: int, path: str) -> Reader:
    """A named tuple."""
    message = parser.structure.classes[parser.next()]
    kind = resolve(message, parser.allow_pickle)
    readers = [parser.node(depth + 1, f"{path}.{name}") for name in message.fields]
    if not issubclass(kind, tuple):
        raise Malformed(f"{message.path} is no named tuple")
    return lambda values: tuple.__new__(kind, [reader(values) for reader in readers])


def compile_member(parser: Parser, depth: int, path: str) -> Reader:
    """A member of an enum."""
    message = parser.structure.classes[parser.next()]
    kind = resolve(message, parser.allow_pickle)
    if not issubclass(kind, enum.Enum):
        raise Malformed(f"{message.path} is no enum")
    members = kind.__members__

    def read(values: Values) -> enum.Enum:
        name = next(values.texts)
        if name not in members:
            raise Malformed(f"{message.path} has no member {name!r:.80}")
        return members[name]

    return read


def compile_pickle(parser: Parser, depth: int, path: str) -> Reader:
    """A pickled leaf."""
    if not parser.allow_pickle:
        raise ValueError(f"{path} is pickled, and pickling is off here")
    readers = [parser.node(depth + 1, path) for _ in range(parser.next())]

    def read(values: Values) -> Any:
        crc, count = next(values.numbers), values.count()
        blob = next(values.blobs)
        if count > len(values.buffers):
            raise Malformed(f"{count} buffers of a pickled object")
        outside = [values.take() for _ in range(count)]
        return unpickle(blob, crc, [reader(values) for reader in readers], outside)

    return read


def compile_ref(parser: Parser, depth: int, path: str) -> Reader:
    """An object that is already there."""
    number = parser.next()
    parser.referring = True
    if parser.hashed:
        raise Malformed("a reference inside of what is hashed")
    return lambda values: values.done[number]


def plain(reader: Reader) -> Any:
    """A compiler that always gives this reader."""
    return lambda parser, depth, path: reader


COMPILERS.update(
    {
        Op.NONE: plain(read_none),
        Op.BOOL: plain(read_bool),
        Op.INT: plain(read_int),
        Op.BIG_INT: plain(read_big_int),
        Op.REAL: plain(read_real),
        Op.COMPLEX: plain(read_complex),
        Op.TEXT: plain(read_text),
        Op.WIDE_TEXT: plain(read_wide_text),
        Op.LONG_TEXT: plain(read_long_text),
        Op.BYTES: plain(read_bytes),
        Op.LONG_BYTES: plain(read_long_bytes),
        Op.BYTEARRAY: compile_bytearray,
        Op.MEMORYVIEW: compile_memoryview,
        Op.LIST: compile_list,
        Op.INTS: plain(read_ints),
        Op.REALS: plain(read_reals),
        Op.BOOLS: plain(read_bools),
        Op.TEXTS: plain(read_texts),
        Op.SHORTS: compile_shorts,
        Op.LONGS: compile_longs,
        Op.TUPLE: compile_tuple,
        Op.SET: compile_set,
        Op.FROZENSET: compile_frozenset,
        Op.DICT: compile_dict,
        Op.MAPPING: compile_mapping,
        Op.ORDERED: compile_ordered,
        Op.RECORD: compile_record,
        Op.NAMED: compile_named,
        Op.MEMBER: compile_member,
        Op.PICKLE: compile_pickle,
        Op.REF: compile_ref,
    }
)

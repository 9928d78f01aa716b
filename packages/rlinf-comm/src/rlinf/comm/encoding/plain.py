"""How plain Python values and containers are written down, by exact type.

Which type goes where is in classify.py.
"""

from array import array
from collections import OrderedDict
from typing import Any, Final

from rlinf.comm.encoding.structure import (
    CODES,
    FEW,
    INLINE_BYTES,
    INLINE_CHARS,
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    Op,
)
from rlinf.comm.encoding.walk import ENCODERS, PENDING, Forgetful, Refused, Walk

_STRINGS: Final = {str}
_INTS: Final = {int}
_BOOLS: Final = {bool}
_FLOATS: Final = {float}


def encode_none(walk: Walk, value: None, depth: int) -> None:
    """None."""
    walk.program.append(Op.NONE)


def encode_bool(walk: Walk, value: bool, depth: int) -> None:
    """True and False are values, so that they do not change the structure."""
    walk.program.append(Op.BOOL)
    walk.numbers.append(1 if value else 0)


def encode_int(walk: Walk, value: int, depth: int) -> None:
    """An int of any size."""
    if INT_MIN <= value <= INT_MAX:
        walk.program.append(Op.INT)
        walk.numbers.append(value)
    else:
        walk.program.append(Op.BIG_INT)
        walk.blobs.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def encode_float(walk: Walk, value: float, depth: int) -> None:
    """A float, bit by bit."""
    walk.program.append(Op.REAL)
    walk.reals.append(value)


def encode_complex(walk: Walk, value: complex, depth: int) -> None:
    """A complex number."""
    walk.program.append(Op.COMPLEX)
    walk.reals += (value.real, value.imag)


def encode_str(walk: Walk, value: str, depth: int) -> None:
    """A string; a long one is a buffer."""
    if len(value) > INLINE_CHARS:
        _long_str(walk, value)
    elif walk.careful and not is_utf8(value):
        walk.program.append(Op.WIDE_TEXT)
        walk.blobs.append(value.encode("utf-8", "surrogatepass"))
    else:
        walk.program.append(Op.TEXT)
        walk.texts.append(value)


def _long_str(walk: Walk, value: str) -> None:
    if not _refer(walk, value):
        walk.program.append(Op.LONG_TEXT)
        walk.buffers.append(memoryview(value.encode("utf-8", "surrogatepass")))
        walk.leave(value)


def is_utf8(value: str) -> bool:
    """Whether the string has no lone surrogates, so that protobuf takes it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_bytes(walk: Walk, value: bytes, depth: int) -> None:
    """Bytes; many of them are a buffer."""
    if len(value) <= INLINE_BYTES:
        walk.program.append(Op.BYTES)
        walk.blobs.append(value)
    elif not _refer(walk, value):
        walk.program.append(Op.LONG_BYTES)
        walk.buffers.append(memoryview(value))
        walk.leave(value)


def encode_bytearray(walk: Walk, value: bytearray, depth: int) -> None:
    """A bytearray arrives as one of its own."""
    if not _refer(walk, value):
        walk.program += (Op.BYTEARRAY, Op.LONG_BYTES)
        walk.buffers.append(memoryview(value))
        walk.leave(value)


def encode_memoryview(walk: Walk, value: memoryview, depth: int) -> None:
    """A memoryview arrives as one over the received memory, packed in C order."""
    if _refer(walk, value):
        return
    code = value.format.removeprefix("@")
    if len(code) != 1:
        raise Refused(value, f"a memoryview of format {value.format!r} cannot be rebuilt")
    walk.program += (Op.MEMORYVIEW, walk.name(code), value.ndim)
    walk.numbers += value.shape or ()
    if value.nbytes == 0:
        walk.buffers.append(memoryview(b""))
    elif value.c_contiguous:
        walk.buffers.append(value.cast("B"))
    else:
        walk.buffers.append(memoryview(value.tobytes()))
    walk.leave(value)


def _refer(walk: Walk, value: object) -> bool:
    """Write a leaf seen before as a reference."""
    number = walk.memo.get(id(value))
    if number is None:
        return False
    walk.program += (Op.REF, number)
    return True


# -- containers: enter and leave are written out, they are most of the cost -----------------------


def encode_list(walk: Walk, value: list[Any], depth: int) -> None:
    """A list; of ints, floats, bools or strings alone: in one go."""
    memo, key = walk.memo, id(value)
    if memo.get(key) is not None or depth > MAX_DEPTH:
        walk.enter(value, depth)
        return
    memo[key] = PENDING
    encode_items(walk, value, depth)
    memo[key] = walk.done
    walk.done += 1


def encode_tuple(walk: Walk, value: tuple[Any, ...], depth: int) -> None:
    """A tuple."""
    memo, key = walk.memo, id(value)
    if memo.get(key) is not None or depth > MAX_DEPTH:
        walk.enter(value, depth)
        return
    memo[key] = PENDING
    walk.program.append(Op.TUPLE)
    encode_items(walk, value, depth)
    memo[key] = walk.done
    walk.done += 1


def encode_items(walk: Walk, value: list[Any] | tuple[Any, ...], depth: int) -> None:
    """The items of a list or tuple, as a list."""
    if value:
        uniform = _UNIFORM.get(type(value[0]))
        if uniform is not None and uniform(walk, value):
            return
    walk.program += (Op.LIST, len(value))
    depth += 1
    for item in value:
        ENCODERS[type(item)](walk, item, depth)


def _ints(walk: Walk, value: list[Any] | tuple[Any, ...]) -> bool:
    if set(map(type, value)) != _INTS:
        return False
    if len(value) > FEW:
        return any(_machine(walk, value, code) for code in range(3))
    if min(value) < INT_MIN or max(value) > INT_MAX:
        return False
    walk.program.append(Op.INTS)
    walk.numbers.append(len(value))
    walk.numbers += value
    return True


def _machine(walk: Walk, value: list[Any] | tuple[Any, ...], code: int) -> bool:
    try:
        data = array(CODES[code], value)
    except OverflowError:
        return False
    walk.numbers.append(len(data))
    if len(data) * data.itemsize > INLINE_BYTES:
        walk.program += (Op.LONGS, code)
        walk.buffers.append(memoryview(data).cast("B"))
    else:
        walk.program += (Op.SHORTS, code)
        walk.blobs.append(data.tobytes())
    return True


def _bools(walk: Walk, value: list[Any] | tuple[Any, ...]) -> bool:
    if set(map(type, value)) != _BOOLS:
        return False
    walk.program.append(Op.BOOLS)
    walk.numbers.append(len(value))
    walk.numbers += map(int, value)
    return True


def _reals(walk: Walk, value: list[Any] | tuple[Any, ...]) -> bool:
    if set(map(type, value)) != _FLOATS:
        return False
    if len(value) > FEW:
        return _machine(walk, value, CODES.index("d"))
    walk.program.append(Op.REALS)
    walk.numbers.append(len(value))
    walk.reals += value
    return True


def _texts(walk: Walk, value: list[Any] | tuple[Any, ...]) -> bool:
    if set(map(type, value)) != _STRINGS or max(map(len, value)) > INLINE_CHARS:
        return False
    if walk.careful and not all(map(is_utf8, value)):
        return False
    walk.program.append(Op.TEXTS)
    walk.numbers.append(len(value))
    walk.texts += value
    return True


_UNIFORM: Final = {int: _ints, bool: _bools, float: _reals, str: _texts}


def encode_dict(walk: Walk, value: dict[Any, Any], depth: int) -> None:
    """A dict; string keys belong to the structure, others are values."""
    memo, key = walk.memo, id(value)
    if memo.get(key) is not None or depth > MAX_DEPTH:
        walk.enter(value, depth)
        return
    memo[key] = PENDING
    encode_pairs(walk, value, depth)
    memo[key] = walk.done
    walk.done += 1


def encode_pairs(walk: Walk, value: dict[Any, Any], depth: int) -> None:
    """The items of a dict, in their order."""
    keys = tuple(value)
    if set(map(type, keys)) <= _STRINGS and not (walk.careful and not all(map(is_utf8, keys))):
        number = walk.keys.setdefault(keys, len(walk.keys))
        walk.program += (Op.DICT, number)
        depth += 1
        for item in value.values():
            ENCODERS[type(item)](walk, item, depth)
    else:
        walk.program.append(Op.MAPPING)
        _encode_hashed(walk, keys, depth)
        encode_items(walk, tuple(value.values()), depth)


def _encode_hashed(walk: Walk, items: tuple[Any, ...], depth: int) -> None:
    """Items that will be hashed: written in full, see `Forgetful`."""
    memo = walk.memo
    walk.memo = Forgetful()
    walk.keep.append(items)
    encode_items(walk, items, depth)
    walk.memo = memo


def encode_ordered_dict(walk: Walk, value: "OrderedDict[Any, Any]", depth: int) -> None:
    """An OrderedDict with its attributes (a torch state dict has some)."""
    if walk.enter(value, depth):
        walk.program.append(Op.ORDERED)
        encode_pairs(walk, value, depth)
        attributes = vars(value) or None
        ENCODERS[type(attributes)](walk, attributes, depth + 1)
        walk.leave(value)


def encode_set(walk: Walk, value: set[Any], depth: int) -> None:
    """A set, in no particular order."""
    if walk.enter(value, depth):
        walk.program.append(Op.SET)
        _encode_hashed(walk, tuple(value), depth)
        walk.leave(value)


def encode_frozenset(walk: Walk, value: frozenset[Any], depth: int) -> None:
    """A frozenset, in no particular order."""
    if walk.enter(value, depth):
        walk.program.append(Op.FROZENSET)
        _encode_hashed(walk, tuple(value), depth)
        walk.leave(value)

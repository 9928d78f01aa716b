"""The operations of a structure's program, and the limits both sides keep to.

A program is the object in pre-order: an operation, its arguments, then its children. Operations
take values from the header's lists, in order. The numbers are wire format: never reuse one.

    op          arguments       values consumed                     children
    NONE
    BOOL                        number
    INT                         number
    BIG_INT                     blob (little endian, signed)
    REAL                        real
    COMPLEX                     2 reals
    TEXT                        text
    WIDE_TEXT                   blob (UTF-8 with surrogates)
    LONG_TEXT                   buffer (the same)
    BYTES                       blob
    LONG_BYTES                  buffer
    BYTEARRAY                                                       1: bytes
    MEMORYVIEW  format, ndim    ndim numbers, buffer
    LIST        n                                                   n
    INTS REALS BOOLS TEXTS      number n, n values (a list)
    TUPLE                                                           1: a list
    SET FROZENSET               (children may hold no REF)          1: a list
    DICT        keys                                                one a key
    MAPPING     (keys: no REF)                                      2: list of keys, of values
    ORDERED                                                         2: a dict, its attributes
    RECORD      class                                               one a field
    NAMED       class                                               one a field
    MEMBER      class           text (the member's name)
    SCALAR      dtype           blob
    ARRAY       dtype, ndim     ndim numbers, buffer
    OBJECTS     ndim            ndim numbers                        1: a list
    TENSOR      flags, dtype, ndim    ndim numbers, buffer
    DEVICE      name                                                1: a tensor
    FOREIGN     name                                                1: an array
    WINDOW                      2 numbers: buffer, offset_bytes     1: array or tensor without
                                                                    a buffer of its own
    PARCEL                      number of buffers, blob, buffers
    PICKLE      n               2 numbers: crc, buffers; blob; buffers    n: what was lifted out
    REF         n               (the n-th object to have been finished)
"""

import enum
from typing import Final


class Op(enum.IntEnum):
    """See the table above."""

    NONE = 0
    BOOL = 1
    INT = 2
    BIG_INT = 3
    REAL = 4
    COMPLEX = 5
    TEXT = 6
    WIDE_TEXT = 7
    LONG_TEXT = 8
    BYTES = 9
    LONG_BYTES = 10
    BYTEARRAY = 11
    MEMORYVIEW = 12
    LIST = 13
    INTS = 14
    REALS = 15
    BOOLS = 16
    TEXTS = 17
    TUPLE = 18
    SET = 19
    FROZENSET = 20
    DICT = 21
    MAPPING = 22
    ORDERED = 23
    RECORD = 24
    NAMED = 25
    MEMBER = 26
    SCALAR = 27
    ARRAY = 28
    OBJECTS = 29
    TENSOR = 30
    DEVICE = 31
    FOREIGN = 32
    WINDOW = 33
    PARCEL = 34
    PICKLE = 35
    REF = 36


MAX_DEPTH: Final = 100
"""Containers deeper than this are pickled as a whole (and refused where pickling is)."""

INLINE_BYTES: Final = 512
"""Byte strings up to this size travel in the header, longer ones as a buffer."""

INLINE_CHARS: Final = 4096
"""Strings up to this length travel in the header, longer ones as a buffer."""

INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 63) - 1

FLAG_GRAD: Final = 1
FLAG_PARAMETER: Final = 2

DTYPES: Final[tuple[str, ...]] = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""Dtypes with a number of their own, the same for every array library. Append only."""

NAMED_DTYPE: Final = 64
"""Dtype numbers from here on are indexes into the structure's names."""

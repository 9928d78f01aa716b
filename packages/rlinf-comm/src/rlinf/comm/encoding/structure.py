"""The operations of a structure's program, and the limits both sides keep to.

A program is the object in pre-order: an operation, its arguments, then its children. Operations
take values from the header's lists, in order. The numbers are wire format: never reuse one. All
hosts are little endian.

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
    SHORTS      code            number n, blob of n machine numbers (a list)
    LONGS       code            number n, buffer of n machine numbers (a list)
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
    CODED       codec           a buffer, after the array's        1: an array without a buffer
    PARCEL                      number of buffers, blob, buffers
    PICKLE      n               2 numbers: crc, buffers; blob; buffers    n: what was lifted out
    REF         n               (the n-th object to have been finished)
"""

from typing import Final


class Op:
    """See the table above. Plain ints: an enum's members hash and compare many times slower."""

    NONE: Final = 0
    BOOL: Final = 1
    INT: Final = 2
    BIG_INT: Final = 3
    REAL: Final = 4
    COMPLEX: Final = 5
    TEXT: Final = 6
    WIDE_TEXT: Final = 7
    LONG_TEXT: Final = 8
    BYTES: Final = 9
    LONG_BYTES: Final = 10
    BYTEARRAY: Final = 11
    MEMORYVIEW: Final = 12
    LIST: Final = 13
    INTS: Final = 14
    REALS: Final = 15
    BOOLS: Final = 16
    TEXTS: Final = 17
    TUPLE: Final = 18
    SET: Final = 19
    FROZENSET: Final = 20
    DICT: Final = 21
    MAPPING: Final = 22
    ORDERED: Final = 23
    RECORD: Final = 24
    NAMED: Final = 25
    MEMBER: Final = 26
    SCALAR: Final = 27
    ARRAY: Final = 28
    OBJECTS: Final = 29
    TENSOR: Final = 30
    DEVICE: Final = 31
    FOREIGN: Final = 32
    WINDOW: Final = 33
    PARCEL: Final = 34
    PICKLE: Final = 35
    REF: Final = 36
    SHORTS: Final = 37
    LONGS: Final = 38
    CODED: Final = 39


MAX_DEPTH: Final = 100
"""Containers deeper than this are pickled as a whole (and refused where pickling is)."""

INLINE_BYTES: Final = 512
"""Byte strings up to this size travel in the header, longer ones as a buffer."""

INLINE_CHARS: Final = 4096
"""Strings up to this length travel in the header, longer ones as a buffer."""

FEW: Final = 16
"""Lists of up to this many numbers travel as varints, longer ones as machine numbers."""

CODES: Final = ("h", "i", "q", "d")
"""The formats of machine numbers, in the words of `array`."""

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

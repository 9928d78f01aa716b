"""The round trip against the object itself as the model, for objects hypothesis makes up."""

import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from rlinf.comm.codec import Parcel, join, split
from rlinf.comm.encoding.shorthand import MOST_BYTES, SLOTS, Restorer, Shortener
from rlinf.comm.errors import CodecError


@dataclasses.dataclass
class Record:
    a: object
    b: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: object


Pair = namedtuple("Pair", "left right")

INTS = st.integers() | st.integers(-(2**80), 2**80)
HASHABLE = st.recursive(
    st.none() | st.booleans() | INTS | st.text(st.characters()) | st.binary(max_size=8),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
DTYPES = hn.scalar_dtypes() | hn.array_dtypes() | hn.nested_dtypes()
ARRAYS = hn.arrays(
    DTYPES.filter(lambda dtype: not dtype.hasobject and dtype.itemsize > 0),
    hn.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@st.composite
def views(draw):
    base = draw(hn.arrays(np.int16, hn.array_shapes(max_dims=3, max_side=5)))
    return base[draw(hn.basic_indices(base.shape, allow_newaxis=True, allow_ellipsis=True))]


LEAVES = (
    st.none()
    | st.booleans()
    | INTS
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary(max_size=20)
    | st.binary(min_size=510, max_size=515)
    | st.dates()
    | ARRAYS
    | views()
    | st.lists(INTS, min_size=14, max_size=20)
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
        | st.sets(HASHABLE, max_size=3)
        | st.builds(Record, inner, inner)
        | st.builds(Slotted, inner)
        | st.builds(Pair, inner, inner)
        | inner.map(Parcel.pack)
        | inner.map(lambda value: [value, value])
    ),
    max_leaves=12,
)


def same(one, other, seen):
    """Equal in type, value and in what is shared with what."""
    if seen.setdefault(id(one), other) is not other and not is_atom(one):
        return False
    if type(one) is not type(other):
        return (
            isinstance(one, np.generic) and one.dtype == other.dtype and bytes(one) == bytes(other)
        )
    if isinstance(one, Parcel):
        return same(one.open(), other.open(), {})
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and equal(one, other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, n), getattr(other, n), seen) for n in names)
    if isinstance(one, dict):
        # No list of the values: once it is gone, another object may have its id.
        pairs = zip(one.values(), other.values(), strict=True)
        return list(one) == list(other) and all(same(a, b, seen) for a, b in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(lambda a, b: same(a, b, seen), one, other))
    return one == other


def is_atom(value):
    """Whether nobody can tell whether two references are to one object."""
    return not isinstance(value, (list, dict, set, np.ndarray, Record, bytearray))


def equal(one, other):
    """Elements equal; padding between the fields of a structure does not count."""
    if one.dtype.names is not None:
        return all(equal(one[name], other[name]) for name in one.dtype.names)
    return one.tobytes() == other.tobytes()


@settings(max_examples=150, deadline=None)
@given(OBJECTS)
def test_what_comes_out_is_what_went_in(value):
    header, buffers = split(value)
    # As over a wire: the receiver's memory is its own.
    back = join(header, [bytearray(buffer) for buffer in buffers])
    assert same(value, back, {})
    again = split(back)
    assert len(again.buffers) == len(buffers)
    assert same(back, join(*again), {})


# -- structures once a connection -----------------------------------------------------------------


def structured(number):
    return {f"a rather long key of structure {number}": [None] * (number % 7), "n": number}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * SLOTS), max_size=600))
def test_a_shortened_header_is_restored_whatever_came_before(numbers):
    shortener, restorer = Shortener(), Restorer()
    for number in numbers:
        header = split(structured(number)).header
        assert restorer.restore(shortener.shorten(header)) == header


def test_the_second_header_of_a_structure_is_its_values_only():
    shortener, restorer = Shortener(), Restorer()
    first, second = (split({"some key": n, "another key": "x"}).header for n in (1, 2))
    sent = [shortener.shorten(first), shortener.shorten(second)]
    assert len(sent[0]) == len(first) + 2
    assert len(sent[1]) < 12
    assert [restorer.restore(header) for header in sent] == [first, second]


def test_tiny_and_large_structures_are_sent_as_they_are():
    large = {f"{number:01000}": 0 for number in range(70)}
    assert len(split(large).header) > MOST_BYTES
    for value in (1, "x", large):
        shortener, header = Shortener(), split(value).header
        assert shortener.shorten(header) == shortener.shorten(header) == header


def test_more_structures_than_slots_push_out_the_oldest():
    shortener, restorer = Shortener(), Restorer()
    headers = [split(structured(number)).header for number in range(SLOTS + 1)]
    for header in headers:
        restorer.restore(shortener.shorten(header))
    assert len(shortener.shorten(headers[-1])) < 40
    assert len(shortener.shorten(headers[0])) > len(headers[0])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=12) | st.binary(max_size=12).map(lambda data: b"\x30" + data))
def test_no_bytes_hurt_the_restorer(data):
    restorer = Restorer()
    try:
        header = restorer.restore(data)
    except CodecError:
        return
    assert header == data or data[0] == 0x30

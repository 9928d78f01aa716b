"""Many items in one message: what goes in comes out, and nonsense is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.channel.batching import (
    LARGE,
    RAW,
    SMALL,
    SMALL_BYTES,
    Crate,
    crate,
    pack,
    uncrate,
    unpack,
)
from rlinf.channel.tags import expand, ranges
from rlinf.comm import join, split

VALUES = st.one_of(
    st.binary(max_size=100),
    st.text(max_size=20),
    st.integers(),
    st.none(),
    st.lists(st.floats(allow_nan=False), max_size=5),
    st.dictionaries(st.text(max_size=3), st.binary(max_size=5), max_size=3),
    st.integers(0, 3).map(lambda n: b"x" * (SMALL_BYTES - 1 + n)),
)
LOADED = st.lists(
    st.tuples(VALUES, st.floats(0.1, 10.0), st.none() | st.text(max_size=3)), max_size=8
)


@settings(deadline=None)
@given(LOADED)
def test_a_crate_holds_what_was_put_in(rows: list[tuple[object, float, str | None]]) -> None:
    message = crate([(pack(value), weight, key) for value, weight, key in rows])
    packed = split(tuple(message))
    arrived = Crate(*join(packed.header, packed.buffers))
    out = uncrate(arrived)
    assert [(unpack(cargo), weight, key) for cargo, weight, key in out] == rows
    again = uncrate(crate(out))
    assert [unpack(cargo) for cargo, _, _ in again] == [value for value, _, _ in rows]


def test_kinds_by_size() -> None:
    assert pack(b"x").kind == RAW
    assert pack(np.zeros(10)).kind == SMALL
    assert pack(np.zeros(SMALL_BYTES)).kind == LARGE
    assert pack(b"x" * (SMALL_BYTES + 1)).kind == LARGE


def test_small_arrays_are_aligned_and_writable() -> None:
    rows = [(pack(value), 1.0, None) for value in (b"odd", np.arange(3.0), b"x", np.arange(7.0))]
    arrays = [unpack(cargo) for cargo, _, _ in uncrate(crate(rows))][1::2]
    for array in arrays:
        assert array.flags.aligned and array.flags.writeable


@settings(deadline=None)
@given(LOADED, st.binary(max_size=40), st.integers(0, 2))
def test_nonsense_is_refused(
    rows: list[tuple[object, float, str | None]], noise: bytes, field: int
) -> None:
    message = list(crate([(pack(value), weight, key) for value, weight, key in rows]))
    message[field] = [*message[2], pack(bytes(5000)).content] if field == 2 else noise
    try:
        items = uncrate(Crate(*message))
        _ = [unpack(cargo) for cargo, _, _ in items]
    except ValueError:
        return  # CodecError is one


def test_a_crate_with_too_few_parcels_is_refused() -> None:
    message = crate([(pack(bytes(5000)), 1.0, None)])
    with pytest.raises(ValueError, match="malformed"):
        uncrate(message._replace(parcels=[]))


@given(st.sets(st.integers(0, 50)).map(sorted))
def test_ranges_expand_to_the_same_tags(tags: list[int]) -> None:
    assert expand(ranges(tags)) == tags

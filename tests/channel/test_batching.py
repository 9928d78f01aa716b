"""Many items in one message: what goes in comes out, and nonsense is refused."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.channel.batching import Crate, cargos, collect, load, shelve
from rlinf.channel.cargo import ARRAY, LARGE, RAW, SMALL, SMALL_BYTES, pack, unpack
from rlinf.channel.errors import InvalidWeight
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


def close(rows: list[tuple[object, float, str | None]]) -> Crate:
    return load([(pack(value), weight, key) for value, weight, key in rows])


def travel(message: Crate) -> Crate:
    packed = split(tuple(message))
    return Crate(*join(packed.header, packed.buffers))


def values(message: Crate) -> list[object]:
    return [unpack(cargo) for cargo in cargos(message)]


@settings(deadline=None)
@given(LOADED)
def test_a_crate_holds_what_was_put_in(rows: list[tuple[object, float, str | None]]) -> None:
    items = shelve(travel(close(rows)), "c")
    assert [(item.weight, item.key) for item in items] == [row[1:] for row in rows]
    assert values(travel(collect(items))) == [row[0] for row in rows]


@settings(deadline=None)
@given(LOADED, LOADED, st.randoms())
def test_items_of_many_crates_leave_in_any_order(one: list, two: list, rng: random.Random) -> None:
    rows = [*one, *two]
    pairs = list(zip(rows, [*shelve(close(one), "c"), *shelve(close(two), "c")], strict=True))
    rng.shuffle(pairs)
    message = collect([item for _, item in pairs])
    assert values(message) == [row[0] for row, _ in pairs]
    again = shelve(message, "c")
    assert [(item.weight, item.key) for item in again] == [row[1:] for row, _ in pairs]


def test_runs_of_neighbours_are_one_piece() -> None:
    items = shelve(close([(b"x" * 100, 1.0, None)] * 50), "c")
    assert len(collect(items[10:40]).block) == 30 * 112


def test_kinds_by_size() -> None:
    assert pack(b"x")[0] == RAW
    assert pack(np.zeros(10))[0] == ARRAY
    assert pack([np.zeros(10)])[0] == SMALL
    assert pack(np.zeros(SMALL_BYTES))[0] == LARGE
    assert pack(b"x" * (SMALL_BYTES + 1))[0] == LARGE


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16).reshape(3, 4),
        np.arange(12.0).reshape(3, 4).T,
        np.array(7.5),
        np.zeros((0, 3), np.float32),
        np.array([True, False]),
        np.arange(4, dtype=">i4"),
        np.arange(3, dtype=np.complex64),
        np.zeros((1,) * 9),
        np.array(["a", "bc"]),
        np.zeros(3, [("x", "f4"), ("y", "i8")]),
        np.arange(100.0)[::7],
    ],
    ids=lambda array: f"{array.dtype.str}-{array.shape}",
)
def test_small_arrays_of_all_kinds(array: np.ndarray) -> None:
    (back,) = values(travel(close([(array, 1.0, None)])))
    assert type(back) is np.ndarray and back.shape == array.shape and (back == array).all()
    assert back.dtype == array.dtype


@given(st.binary(max_size=64), st.integers(0, 64))
def test_malformed_arrays_are_refused(piece: bytes, nbytes: int) -> None:
    try:
        unpack((ARRAY, nbytes, piece))
    except ValueError:
        return


def test_small_arrays_are_aligned_and_writable() -> None:
    rows = [(value, 1.0, None) for value in (b"odd", np.arange(3.0), b"x", np.arange(7.0))]
    for array in values(close(rows))[1::2]:
        assert array.flags.aligned and array.flags.writeable


@settings(deadline=None)
@given(LOADED, st.binary(max_size=40), st.integers(0, 2))
def test_nonsense_is_refused(
    rows: list[tuple[object, float, str | None]], noise: bytes, field: int
) -> None:
    message = list(close(rows))
    message[field] = [*message[2], pack(bytes(5000))[2]] if field == 2 else noise
    try:
        values(Crate(*message))
        shelve(Crate(*message), "c")
    except ValueError:
        return  # CodecError and InvalidWeight are two


def test_a_crate_with_too_few_parcels_is_refused() -> None:
    message = close([(bytes(5000), 1.0, None)])
    with pytest.raises(ValueError, match="0 parcels"):
        cargos(message._replace(parcels=[]))


def test_a_weight_that_makes_no_sense_is_refused_at_the_server() -> None:
    with pytest.raises(InvalidWeight):
        shelve(load([(pack(b"x"), -1.0, None)]), "c")


@given(st.sets(st.integers(0, 50)).map(sorted))
def test_ranges_expand_to_the_same_tags(tags: list[int]) -> None:
    assert list(expand(ranges(tags))) == tags

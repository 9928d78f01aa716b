"""Many items in one message: what goes in comes out, and nonsense is refused."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.channel.batching import Crate, cargos, collect, open_run, shelve
from rlinf.channel.cargo import ARRAY, LARGE, RAW, SMALL, SMALL_BYTES, detach, pack, unpack
from rlinf.channel.errors import InvalidWeight
from rlinf.channel.loading import Loading
from rlinf.channel.run import Run
from rlinf.comm import Parcel, PoolExhausted, join, split
from tests.channel.driver import close

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
    st.tuples(VALUES, st.floats(0.1, 10.0), st.none() | st.text(max_size=3)), min_size=1, max_size=8
)


def packed(rows: list[tuple[object, float, str | None]]) -> Crate:
    return close((pack(value), weight, key) for value, weight, key in rows)


def travel(message: Crate) -> Crate:
    return Crate(*join(*split(tuple(message))))


def values(runs: list[Run]) -> list[object]:
    return [unpack(cargo) for run in runs for cargo in cargos(run)]


def singles(runs: list[Run]) -> list[Run]:
    return [run.split(1) for run in runs for _ in range(run.count)]


def facts(runs: list[Run]) -> list[tuple[float, str | None]]:
    return [(run.weight, run.key) for run in singles(runs)]


@settings(deadline=None)
@given(LOADED)
def test_a_crate_holds_what_was_put_in(rows: list[tuple[object, float, str | None]]) -> None:
    runs = shelve(travel(packed(rows)), "c")
    (again,) = collect(runs)
    back = shelve(travel(again), "c")
    assert values(back) == [row[0] for row in rows]
    assert facts(back) == facts(runs) == [row[1:] for row in rows]


@settings(deadline=None)
@given(LOADED, LOADED, st.randoms())
def test_items_of_many_crates_leave_in_any_order(one: list, two: list, rng: random.Random) -> None:
    rows = [*one, *two]
    runs = singles([*shelve(packed(one), "c"), *shelve(packed(two), "c")])
    pairs = list(zip(rows, runs, strict=True))
    rng.shuffle(pairs)
    messages = collect([run for _, run in pairs])
    again = [run for message in messages for run in shelve(message, "c")]
    assert values(again) == [row[0] for row, _ in pairs]
    assert facts(again) == [row[1:] for row, _ in pairs]


@settings(deadline=None)
@given(LOADED, st.integers(0, 8), st.integers(0, 8))
def test_a_part_of_a_run_is_these_items(rows: list, first: int, count: int) -> None:
    rows = [(value, weight, "k") for value, weight, _ in rows]
    (run,) = shelve(packed(rows), "c")
    run.split(min(first, run.count - 1))
    part = run.split(min(max(count, 1), run.count))
    chosen = rows[first : first + part.count] if first < len(rows) else rows[-1:]
    (message,) = collect([part])
    (back,) = shelve(travel(message), "c")
    assert values([part]) == values([back]) == open_run(back) == [row[0] for row in chosen]
    assert back.weight == pytest.approx(sum(row[1] for row in chosen))


def test_neighbours_are_one_piece_and_what_is_alike_is_said_once() -> None:
    (run,) = shelve(packed([(b"x" * 100, 1.0, None)] * 50), "c")
    run.split(10)
    (message,) = collect([run.split(15), run.split(15)])
    assert len(message.block) == 30 * 100
    assert message[:5] == (30, 1.0, 100, 100, RAW)


def test_large_neighbours_are_not_copied() -> None:
    runs = [shelve(packed([(bytes(4000), 1.0, None)] * 20), "c")[0] for _ in range(3)]
    assert [message.items for message in collect(runs)] == [20, 20, 20]


@pytest.mark.parametrize(
    "items",
    [
        [b"x" * 1024] * 5,
        [bytes([n % 256]) * 1024 for n in range(321)],
        [bytes([n, n, n]) for n in range(200)],
        [b"a", b"", b"ccc"],
        [b"", b""],
        [np.arange(6, dtype=np.int16).reshape(2, 3) + n for n in range(4)],
        [np.array(1.5), np.array(2.5)],
        [np.zeros((0, 2)), np.zeros((0, 2))],
        [np.arange(3), np.arange(4)],
        [np.arange(10)[::2], np.arange(10)[1::2]],
        [b"bytes", np.arange(3), "text"],
    ],
    ids=lambda items: f"{len(items)}-{items[0]!r:.12}",
)
def test_items_that_are_alike_are_closed_and_opened_together(items: list[object]) -> None:
    message = Loading()
    if not message.add_alike(items, [1.0] * len(items), None, np.empty):
        message = Loading()
        for value in items:
            message.add(pack(value), 1.0, None)
    assert message.nbytes == sum(pack(value)[1] for value in items)
    (run,) = shelve(travel(message.crate()), "c")
    for back, value in zip(open_run(run), items, strict=True):
        assert type(back) is type(value)
        np.testing.assert_array_equal(back, value)
        if isinstance(back, np.ndarray):
            assert back.dtype == value.dtype and back.flags.writeable and back.flags.aligned


def test_much_is_written_straight_to_the_memory_that_is_sent() -> None:
    made: list[np.ndarray] = []

    def empty(count: int, kind: type) -> np.ndarray:
        made.append(np.empty(count, kind))
        return made[-1]

    items: list[object] = [bytes([n % 256]) * 1024 for n in range(300)]
    message = Loading()
    assert message.add_alike(items, 1.0, None, empty)
    assert np.shares_memory(np.frombuffer(message.crate().block, np.uint8), made[0])
    assert message.add_alike([b"few"] * 3, 1.0, None, empty)
    assert len(made) == 1


def test_large_items_are_detached_in_one_piece_where_there_is_room() -> None:
    def pool_of(limit: int) -> Callable[[int, type], np.ndarray]:
        def empty(count: int, kind: type) -> np.ndarray:
            if count > limit:
                raise PoolExhausted("too much", needed_bytes=count, limit_bytes=limit)
            return np.empty(count, kind)

        return empty

    values = [{"a": np.arange(5000) + n, "b": np.arange(3000) - n} for n in range(4)]
    packed = [Parcel.pack(value) for value in values]
    for limit, together in ((1 << 30, True), (1 << 17, False)):
        parcels = detach(packed, pool_of(limit))
        owners = {id(buffer.obj) for parcel in parcels for buffer in parcel.buffers}
        assert len(owners) == (1 if together else len(values))
        for parcel, value in zip(parcels, values, strict=True):
            np.testing.assert_equal(parcel.open(), value)
    with pytest.raises(PoolExhausted):
        detach(packed, pool_of(1000))


def test_what_was_loaded_in_several_ways_is_one_message() -> None:
    rows = [(b"a", 2.0, None), (b"b", 2.0, None), ([1], 1.0, "k"), (b"cc", 3.0, None)]
    rows += [(bytes(SMALL_BYTES + 1), 1.0, None), (b"d", 4.0, "k"), (b"ee", 5.0, None)]
    message, one, other = Loading(), Loading(), Loading()
    assert message.add_alike([b"a", b"b"], 2.0, None, np.empty)
    for value, weight, key in rows[2:5]:
        one.add(pack(value), weight, key)
    assert other.add_alike([b"d", b"ee"], [4.0, 5.0], ["k", None], np.empty)
    message.extend(one)
    message.extend(other)
    assert (message.count, len(one.parcels)) == (len(rows), 1)
    runs = shelve(travel(message.crate()), "c")
    assert values(runs) == [row[0] for row in rows]
    assert facts(runs) == [row[1:] for row in rows]


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
    (back,) = values(shelve(travel(packed([(array, 1.0, None)])), "c"))
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
    for array in values(shelve(packed(rows), "c"))[1::2]:
        assert array.flags.aligned and array.flags.writeable


@settings(deadline=None)
@given(LOADED, st.binary(max_size=40) | st.integers(-3, 3), st.integers(0, 6))
def test_nonsense_is_refused(
    rows: list[tuple[object, float, str | None]], noise: object, field: int
) -> None:
    message = list(packed(rows))
    message[field] = [*message[6], pack(bytes(5000))[2]] if field == 6 else noise
    try:
        values(shelve(Crate(*message), "c"))
    except ValueError:
        return  # CodecError and InvalidWeight are two


def test_a_crate_with_too_few_parcels_is_refused() -> None:
    message = packed([(bytes(5000), 1.0, None)])
    with pytest.raises(ValueError, match="0 parcels"):
        shelve(message._replace(parcels=[]), "c")


@pytest.mark.parametrize("weights", [[-1.0], [1.0, 0.0], [1.0, float("nan")], [float("inf")] * 2])
def test_a_weight_that_makes_no_sense_is_refused_at_the_server(weights: list[float]) -> None:
    with pytest.raises(InvalidWeight):
        shelve(close((pack(b"x"), weight, None) for weight in weights), "c")

"""Values and containers: what goes in comes out, of the same type."""

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import pytest

from rlinf.comm.codec import Packed, join, split
from rlinf.comm.errors import CodecError
from rlinf.comm.proto.message_pb2 import Header

T = TypeVar("T")


def round_trip(value, **options):
    packed = split(value, **options)
    return join(packed.header, packed.buffers, **options)


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    CRIMSON = 1  # noqa: PIE796


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    x: int
    y: tuple = ()


@dataclasses.dataclass
class Record:
    a: object
    b: object = None
    shared: ClassVar[int] = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: object
    b: object = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    a: object


@dataclasses.dataclass
class Child(Record):
    c: int = 5


@dataclasses.dataclass
class Boxed(Generic[T]):
    item: T


@dataclasses.dataclass
class Empty:
    pass


@dataclasses.dataclass
class Counted:
    a: int
    total: int = dataclasses.field(init=False)
    runs: ClassVar[int] = 0

    def __post_init__(self):
        self.total = self.a * 2
        type(self).runs += 1


@dataclasses.dataclass
class Stated:
    a: int

    def __getstate__(self):
        return {"a": self.a + 1}

    def __setstate__(self, state):
        self.a = state["a"] * 10


@dataclasses.dataclass
class Mapped(dict):
    a: int = 0


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __eq__(self, other):
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None

    def __repr__(self):
        return f"Plain({self.__dict__})"


VALUES = [
    None,
    True,
    False,
    *(0, 1, -1, 127, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64),
    *(2**1000, -(2**1000)),
    *(0.0, -0.0, 1.5, float("inf"), float("-inf"), 5e-324, 1e308),
    *(2j, complex(-0.0, 3)),
    *("", "x", "ünïcode 🐈", "\0", "\ud800", "a\udfffb", "x" * 4097, "é" * 5000, "\ud800" * 5000),
    *(b"", b"\0\xff", b"x" * 512, b"x" * 513, bytearray(), bytearray(b"ab"), bytearray(5000)),
    *([], (), {}, set(), frozenset()),
    *([None], [[]], [[], [[]]], ((),), [1, 2, 3], (1, 2), [True, False], [1, True], [1, 2.0]),
    *([2**70, 1], [1, 2**63], list(range(17)), list(range(-40000, 40000, 100)), [2**40] * 20),
    *([2**63] * 20, [-(2**63)] * 20, [True] * 20, [0.5] * 3, [0.5] * 20, [1.0, 2], [0.1] * 1000),
    *(["a", "b"], ["a", "\ud800"], ["x" * 5000, "a"], ("a",) * 20, [b"a", "a", 1, None, 1.0]),
    *({"a": 1}, {"a": {"b": [1, {"c": None}]}}, {1: 2}, {"a": 1, 2: 3}, {None: 1, (1, "x"): 2}),
    *({"\ud800": 1}, {"": 0, "a b": 1}, {True: 0, "True": 1}, {1.5: {2: {}}}, {b"k": "v"}),
    *({1, 2, 3}, {"a", 1, None, (1, (2, 3))}, {frozenset({1}), frozenset()}, frozenset({"x"})),
    *(Color.RED, Color.GREEN, Color.CRIMSON, Level.LOW, Bits.A, Bits.A | Bits.B, Bits(0)),
    *(Pair(1, "x"), Pair([], Pair(None, ())), Typed(1), Typed(2, (3,))),
    *(Record(1), Record(Record([1]), {"x": Frozen(2)}), Child(1, 2, 3), Boxed([1]), Empty()),
    *(Frozen(1), Frozen((1, 2), []), Slotted(1), Slotted(Slotted(None)), Stated(4)),
    *(OrderedDict(a=1), OrderedDict([(1, 2), ("b", [])]), defaultdict(list, a=[1]), deque([1, 2])),
    *(datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), datetime.timedelta(1), uuid.uuid4()),
    *(decimal.Decimal("1.10"), fractions.Fraction(1, 3), pathlib.Path("/a"), range(3), slice(1)),
    *(Ellipsis, NotImplemented, int, Record, len, np.float32, np.dtype("f4"), Plain(x=[1])),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_a_value_comes_back_equal_and_of_its_type(value):
    for wrapped in (value, [value], {"k": (value, value)}, Record(value)):
        back = round_trip(wrapped)
        if not isinstance(value, Stated):
            assert back == wrapped
            assert repr(back) == repr(wrapped) or isinstance(value, (set, frozenset, Plain))
        assert type(back) is type(wrapped)


def test_not_a_number_and_negative_zero_keep_their_bits():
    import struct

    for bits in (0x7FF8000000000001, 0x8000000000000000, 0xFFF0000000000000):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        for back in (round_trip(value), round_trip([value] * 20)[7], round_trip([value])[0]):
            assert struct.pack("<d", back) == struct.pack("<Q", bits)


def test_types_within_lists_are_not_mixed_up():
    for value in ([1, True, 1.0], [True, 1], [1] * 20 + [True], [1.0] * 20 + [1], ["a", Color.RED]):
        back = round_trip(value)
        assert list(map(type, back)) == list(map(type, value))


def test_keys_keep_their_type_and_order():
    class Name(str):
        __slots__ = ()

    back = round_trip([{"b": 1, "a": 2}, {Name("b"): 1, "a": 2}])
    assert list(back[0]) == ["b", "a"]
    assert type(next(iter(back[0]))) is str
    assert type(next(iter(back[1]))).__name__ == "Name"


def test_an_aliased_enum_member_and_the_fields_behind_init_are_kept():
    assert round_trip(Color.CRIMSON) is Color.RED
    value = Counted(4)
    runs = Counted.runs
    back = round_trip(value)
    assert (back.a, back.total) == (4, 8)
    assert Counted.runs == runs  # __post_init__ has not run again


def test_a_dataclass_with_more_or_less_than_its_fields_is_kept_whole():
    value = Record(1)
    value.extra = [1]
    assert round_trip(value).extra == [1]
    value = Counted(1)
    del value.total
    assert vars(round_trip(value)) == {"a": 1}
    value = Mapped(5)
    value["k"] = 1
    back = round_trip(value)
    assert (back.a, dict(back)) == (5, {"k": 1})


def test_a_class_with_its_own_state_decides_itself():
    assert round_trip(Stated(4)).a == 50


def test_the_attributes_of_an_ordered_dict_are_kept():
    value = OrderedDict(a=1)
    value._metadata = {"version": 2}
    back = round_trip([value])[0]
    assert back._metadata == {"version": 2}
    assert vars(round_trip(OrderedDict())) == {}


def test_functions_and_local_classes_travel_by_value():
    base = 10

    @dataclasses.dataclass
    class Local:
        x: int

    class Other(enum.Enum):
        ONE = 1

    back = round_trip([lambda x: x + base, Local(3), Other.ONE])
    assert back[0](1) == 11
    assert back[1].x == 3
    assert back[2].name == "ONE"


def test_buffers_out_of_band_are_lifted_from_what_is_pickled():
    value = Plain(array=np.arange(1000.0), nested=[{"b": b"y" * 600}], small=1)
    packed = split(value)
    assert len(packed.header) < 700
    assert sorted(buffer.nbytes for buffer in packed.buffers) == [600, 8000]
    back = join(*packed)
    assert (back.array == value.array).all()
    assert np.shares_memory(back.array, value.array)
    assert back.nested == value.nested


def test_packed_counts_its_bytes():
    packed = split({"a": np.zeros(10), "b": b"x" * 1000})
    assert isinstance(packed, Packed)
    assert packed.nbytes == len(packed.header) + 80 + 1000
    assert all(buffer.ndim == 1 and buffer.format == "B" for buffer in packed.buffers)


def test_any_kind_of_buffer_is_taken():
    header, buffers = split({"a": np.arange(4), "b": "x" * 5000})
    for kind in (bytes, bytearray, lambda b: np.frombuffer(b, np.uint16), memoryview):
        assert join(header, [kind(buffer) for buffer in buffers])["a"].tolist() == [0, 1, 2, 3]


def test_structure_holds_no_values():
    def structure(value):
        return Header.FromString(split(value).header).structure

    batch = {"tokens": [1, 2], "done": True, "text": "a", "x": np.zeros((2, 3)), "m": Color.RED}
    other = {
        "tokens": [3, 4, 5],
        "done": False,
        "text": "b",
        "x": np.ones((7, 1)),
        "m": Color.GREEN,
    }
    assert structure(batch) == structure(other)
    assert structure(batch) != structure({**batch, "more": 1})


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: 1, "$"),
        ({"a": [1, 2, 3, {"fn": lambda: 1}]}, "$.a[3].fn"),
        (Record(1, Pair(1, Plain())), "$.b.right"),
        ({"with space": {5: Plain()}}, "$['with space'][5]"),
        ([{Plain}], "$[0]{<class"),
        ({(1, Plain): 1}, "$.{key (1"),
        (OrderedDict(a=Plain()), "$.a"),
        (np.array([1, Plain()], object), "$"),
    ],
)
def test_without_pickling_a_leaf_is_refused_by_path(value, path):
    with pytest.raises(CodecError) as caught:
        split(value, allow_pickle=False)
    assert caught.value.path.startswith(path) or path.startswith("$.{key")
    assert "pickling, which is off" in str(caught.value)
    with pytest.raises(CodecError, match="pickling is off here"):
        join(*split(value), allow_pickle=False)


def test_without_pickling_everything_else_works():
    value = {"r": Record(Frozen(Pair(Color.RED, {1, 2})), [1, "x"]), "a": np.zeros(3), 1: b"x"}
    back = round_trip(value, allow_pickle=False)
    assert back["r"] == value["r"]
    with pytest.raises(CodecError, match="Local"):

        @dataclasses.dataclass
        class Local:
            x: int

        split(Local(1), allow_pickle=False)


def test_what_cannot_be_pickled_is_refused_by_path_and_reason():
    import threading

    with pytest.raises(CodecError, match=r"\$\.a\[1\]: cannot be pickled: .*lock") as caught:
        split({"a": [0, threading.Lock()]})
    assert caught.value.path == "$.a[1]"
    with pytest.raises(CodecError, match="cannot be pickled"):
        split([(i for i in range(3))])


def test_a_class_of_other_fields_or_no_class_is_refused_by_name():
    packed = split(Record(1))
    assert b"Record" in packed.header
    for header in (
        packed.header.replace(b"Record", b"Rekord"),
        packed.header.replace(b"Record", b"VALUES"),
        packed.header.replace(b"Record", b"Slotte"),
        packed.header.replace(b"Record", b"Level\0"),
    ):
        with pytest.raises(CodecError, match="is not known here, or with other fields"):
            join(header, packed.buffers)


def test_deep_nesting_is_pickled_as_a_whole_or_refused():
    for depth in (99, 100, 101, 150):
        value = []
        for _ in range(depth):
            value = [value]
        assert round_trip(value) == value
    with pytest.raises(CodecError, match="deeper than 100"):
        split(value, allow_pickle=False)
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CodecError, match="deep"):
        split(value)
    while value:
        value = value.pop()


# -- scripts --------------------------------------------------------------------------------------

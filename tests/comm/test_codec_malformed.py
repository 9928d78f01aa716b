"""What is no encoding gives CodecError: never a crash, a hang or memory beyond the message."""

import dataclasses
import datetime
import enum
import random
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.comm.codec import Parcel, join, split
from rlinf.comm.encoding.structure import MAX_DEPTH, Op
from rlinf.comm.errors import CodecError
from rlinf.comm.proto.message_pb2 import Header, Keys, Structure


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    a: object
    b: object


def sample():
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    return {
        "plain": [None, True, -5, 2**70, 1.5, 2j, "text", "\ud800", b"bytes", bytearray(b"x")],
        "long": [b"y" * 600, "z" * 5000, list(range(50)), [0.5] * 100, memoryview(b"abcd")],
        "arrays": [array, array[1], np.float32(3), np.zeros(2, [("a", "i4"), ("b", "S3")])],
        "objects": np.array([1, "a", None], object),
        "records": [Record(1, (2, {3, 4})), Color.RED, OrderedDict(k=frozenset({(1, 2)}))],
        "mapping": {1: [1, 2], (2, "x"): ["s"] * 3},
        "pickled": [datetime.date(2026, 1, 1), datetime.timedelta],
        "parcel": Parcel.pack([array]),
        "again": [array],
    }


def tensors():
    torch = pytest.importorskip("torch")

    base = torch.arange(6, dtype=torch.bfloat16)
    return [base, base[2:4], torch.nn.Parameter(torch.zeros(2)), torch.tensor(1.5)]


def fails_or_decodes(header, buffers, **options):
    try:
        join(header, buffers, **options)
    except CodecError:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [sample, tensors])
def test_changed_bytes_never_do_worse_than_an_error(make):
    header, buffers = split(make())
    buffers = [bytes(buffer) for buffer in buffers]
    dice = random.Random(5)
    failed = 0
    for _ in range(4000):
        data = bytearray(header)
        for _ in range(dice.choice((1, 1, 1, 2, 8))):
            at = dice.randrange(len(data))
            data[at] = dice.choice((data[at] ^ 1 << dice.randrange(8), dice.randrange(256), 0xFF))
        failed += fails_or_decodes(bytes(data), buffers)
    assert failed > 2000


@pytest.mark.filterwarnings("ignore")
def test_every_cut_and_every_insertion_is_an_error_or_decodes():
    header, buffers = split(sample())
    for cut in range(len(header)):
        fails_or_decodes(header[:cut], buffers)
        fails_or_decodes(header[:cut] + b"\0" + header[cut:], buffers)


def test_missing_added_cut_and_swapped_buffers_are_errors():
    header, buffers = split(sample())
    for wrong in (
        buffers[:-1],
        buffers[1:],
        (*buffers, b""),
        (),
        (*buffers[:3], buffers[4], buffers[3], *buffers[5:]),
    ):
        with pytest.raises(CodecError):
            join(header, wrong)
    # Of a list of machine numbers, a memoryview, arrays.
    for index in (3, 4, 5):
        for wrong in (buffers[index][:-1], bytes(buffers[index]) + b"\0", b""):
            with pytest.raises(CodecError):
                join(header, [*buffers[:index], wrong, *buffers[index + 1 :]])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=40), max_size=3))
def test_random_bytes(header, buffers):
    fails_or_decodes(header, buffers, allow_pickle=False)


OPS = st.integers(0, 40) | st.integers(0, 3) | st.sampled_from([64, 2**31, 2**32 - 1])


@st.composite
def messages(draw):
    structure = Structure(
        program=draw(st.lists(OPS, max_size=40)),
        names=draw(st.lists(st.sampled_from(["B", "cpu", '"<f4"', "[", "", "os"]), max_size=3)),
    )
    structure.keys.extend(
        Keys(keys=keys) for keys in draw(st.lists(st.lists(st.text(max_size=3)), max_size=2))
    )
    for path in draw(st.lists(st.sampled_from([f"{__name__}:Record", "os:system"]), max_size=2)):
        structure.classes.add(path=path, fields=["a", "b"])
    numbers = st.integers(-2, 5) | st.integers(-(2**63), 2**63 - 1)
    header = Header(
        structure=structure.SerializeToString(),
        numbers=draw(st.lists(numbers, max_size=20)),
        reals=draw(st.lists(st.floats(), max_size=5)),
        texts=draw(st.lists(st.text(max_size=5), max_size=5)),
        blobs=draw(st.lists(st.binary(max_size=16), max_size=5)),
    )
    return header.SerializeToString(), draw(st.lists(st.binary(max_size=32), max_size=5))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=500, deadline=None)
@given(messages())
def test_random_programs(message):
    fails_or_decodes(*message)
    fails_or_decodes(*message, allow_pickle=False)


def message(program, **fields):
    names, keys = fields.pop("names", ()), fields.pop("keys", ())
    structure = Structure(program=program, names=names, keys=[Keys(keys=k) for k in keys])
    return Header(structure=structure.SerializeToString(), **fields).SerializeToString()


HUGE = (1 << 63) - 1
HOSTILE = {
    "empty": (b"", ()),
    "no program": (message([]), ()),
    "trailing": (message([Op.NONE, Op.NONE]), ()),
    "unused values": (message([Op.NONE], numbers=[1]), ()),
    "unused buffer": (message([Op.NONE]), (b"x",)),
    "unknown op": (message([999]), ()),
    "huge list": (message([Op.LIST, 2**32 - 1]), ()),
    "huge ints": (message([Op.INTS], numbers=[HUGE]), ()),
    "negative ints": (message([Op.INTS], numbers=[-1]), ()),
    "huge array": (message([Op.ARRAY, 1, 1], numbers=[HUGE]), (b"",)),
    "overflowing array": (message([Op.ARRAY, 1, 3], numbers=[2**40, 2**40, 0]), (b"",)),
    "negative shape": (message([Op.ARRAY, 1, 2], numbers=[-2, -2]), (b"1234",)),
    "many dimensions": (message([Op.ARRAY, 1, 2**31], numbers=[1] * 100), (b"1",)),
    "65 dimensions": (message([Op.ARRAY, 1, 65], numbers=[1] * 65), (b"1",)),
    "no such dtype": (message([Op.ARRAY, 63, 0]), (b"1",)),
    "no such name": (message([Op.ARRAY, 64, 0]), (b"1",)),
    "object dtype": (message([Op.ARRAY, 64, 0], names=['"|O"']), (b"12345678",)),
    "nested objects": (
        message([Op.ARRAY, 64, 0], names=['{"base":"|O8","shape":[1]}']),
        (b"12345678",),
    ),
    "huge dtype": (message([Op.SCALAR, 64], names=['"<U999999999"'], blobs=[b"x"]), ()),
    "deep dtype": (message([Op.ARRAY, 64, 0], names=['{"base":' * 5000]), (b"",)),
    "huge objects": (message([Op.OBJECTS, 1, Op.LIST, 0], numbers=[HUGE]), ()),
    "window outside": (message([Op.WINDOW, Op.ARRAY, 1, 1], numbers=[0, 3, 2]), (b"1234",)),
    "window before": (message([Op.WINDOW, Op.ARRAY, 1, 1], numbers=[0, -1, 2]), (b"1234",)),
    "window of nothing": (message([Op.WINDOW, Op.ARRAY, 1, 1], numbers=[7, 0, 1]), ()),
    "window in window": (message([Op.WINDOW, Op.WINDOW, Op.ARRAY, 1, 0]), (b"1",)),
    "huge parcel": (message([Op.PARCEL], numbers=[HUGE], blobs=[b""]), ()),
    "huge pickle": (message([Op.PICKLE, 2**31], numbers=[0, HUGE], blobs=[b""]), ()),
    "forward reference": (message([Op.LIST, 2, Op.REF, 1, Op.LIST, 0]), ()),
    "reference to itself": (message([Op.LIST, 1, Op.REF, 0]), ()),
    "unhashable": (message([Op.SET, Op.LIST, 1, Op.LIST, 0]), ()),
    "set of a dict": (message([Op.SET, Op.DICT, 0], keys=[["a"]]), ()),
    "no such keys": (message([Op.DICT, 3]), ()),
    "no such class": (message([Op.RECORD, 0]), ()),
    "unequal mapping": (message([Op.MAPPING, Op.INTS, Op.LIST, 0], numbers=[1, 1]), ()),
    "odd attributes": (message([Op.ORDERED, Op.LIST, 0, Op.NONE]), ()),
    "odd machine code": (message([Op.SHORTS, 9], blobs=[b"12345678"]), ()),
    "odd machine size": (message([Op.SHORTS, 2], blobs=[b"1234567"]), ()),
    "odd format": (message([Op.MEMORYVIEW, 0, 1], names=["xyz"], numbers=[1]), (b"1",)),
    "odd module": (message([Op.FOREIGN, 0, Op.ARRAY, 1, 0], names=["os"]), (b"1",)),
    "odd device": (message([Op.DEVICE, 0, Op.ARRAY, 1, 0], names=["cpu"]), (b"1",)),
    "odd torch module": (
        message([Op.DEVICE, 0, Op.TENSOR, 0, 1, 0], names=["distributed"]),
        (b"1",),
    ),
    "tensor of no dtype": (message([Op.TENSOR, 0, 64, 0], names=["torch.nn"]), (b"1",)),
    "gradient of ints": (message([Op.TENSOR, 1, 1, 0]), (b"1",)),
    "bad utf-8": (message([Op.WIDE_TEXT], blobs=[b"\xff"]), ()),
    "deep": (message([Op.TUPLE, Op.LIST, 1] * 50_000), ()),
    "deep lists": (message([Op.LIST, 1] * 50_000 + [Op.NONE]), ()),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_are_errors_and_take_no_memory(name):
    header, buffers = HOSTILE[name]
    fails_or_decodes(header, buffers)  # what is imported once does not count
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="malformed message"):
            join(header, buffers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 + 100 * len(header)


def test_hashing_cannot_be_made_to_take_exponential_time():
    doubling = [Op.TUPLE, Op.LIST, 0]
    for number in range(60):
        doubling += [Op.TUPLE, Op.LIST, 2, Op.REF, number, Op.REF, number]
    program = [Op.SET, Op.LIST, 61, *doubling]
    with pytest.raises(CodecError, match="reference inside of what is hashed"):
        join(message(program))


def test_the_depth_that_encodes_is_the_depth_that_decodes():
    value = 1
    for _ in range(MAX_DEPTH):
        value = ({"k": value},)[0]
    assert join(*split(value, allow_pickle=False), allow_pickle=False) == value


def test_a_changed_pickle_is_found_out_before_it_is_read():
    header, _ = split([len, "x"])
    place = header.index(b"builtins")
    changed = header[:place] + b"Builtins" + header[place + 8 :]
    with pytest.raises(CodecError, match="checksum"):
        join(changed)


def test_a_pickle_that_fails_says_why():
    header, _ = split(Raises())
    with pytest.raises(CodecError, match="cannot be rebuilt here: ZeroDivisionError") as caught:
        join(header)
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


class Raises:
    def __reduce__(self):
        return divmod, (1, 0)


def test_without_pickling_no_module_is_imported_and_no_class_made():
    import sys

    header = split(Record(1, 2)).header
    name = b"antigravity:Record"
    old = f"{__name__}:Record".encode()
    structure = Structure.FromString(Header.FromString(header).structure)
    structure.classes[0].path = name.decode()
    changed = Header.FromString(header)
    changed.structure = structure.SerializeToString()
    assert old in header
    with pytest.raises(CodecError, match="import its module"):
        join(changed.SerializeToString(), allow_pickle=False)
    assert "antigravity" not in sys.modules

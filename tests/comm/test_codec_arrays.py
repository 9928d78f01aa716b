"""numpy arrays: every dtype and layout, views, memory, arrays of other libraries."""

import dataclasses
import importlib.util
import mmap
import sys

import numpy as np
import pytest

from rlinf.comm.codec import join, split
from rlinf.comm.errors import CodecError


def round_trip(value):
    return join(*split(value))


NATIVE = ["?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "f", "d", "g", "F", "D", "G"]
OTHERS = [">i2", ">f8", ">c16", "S5", "U3", ">U3", "V7", "M8[s]", "m8[25us]", "<M8[D]", "S1"]
STRUCTURED = [
    np.dtype([("a", "i4"), ("b", "f8")]),
    np.dtype([("a", "i4"), ("b", "f8")], align=True),
    np.dtype([("x", [("y", "u1", (2, 3)), ("z", ">f4")]), ("t", "M8[ns]")]),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [8, 2], "itemsize": 24}),
    np.dtype([("ünï", "U2"), ("", "S3")]),
    np.dtype([]),
]
DTYPES = [*map(np.dtype, NATIVE + OTHERS), *STRUCTURED]
SHAPES = [(), (1,), (5,), (0,), (2, 3), (0, 3), (3, 0, 2), (2, 1, 3, 2), (1,) * 32]


def filled(shape, dtype):
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(7).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
    if dtype.kind == "U":
        data = np.full(int(np.prod(shape)) * dtype.itemsize // 4, ord("x"), dtype.str[0] + "u4")
    return np.ndarray(shape, dtype, data.tobytes()).copy()


def assert_same(back, array):
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.dtype.str == array.dtype.str
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype):
    for shape in SHAPES:
        array = filled(shape, dtype)
        packed = split({"a": [array]}, allow_pickle=False)
        assert packed.buffers[0].nbytes == array.nbytes
        assert_same(join(*packed, allow_pickle=False)["a"][0], array)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_every_scalar(dtype):
    scalar = filled((), dtype)[()]
    back = round_trip([scalar])[0]
    # numpy has two names for some types of the same size, and pads what it does not compare.
    assert type(back).__name__ == type(scalar).__name__.replace("longlong", "int64")
    assert back.dtype == scalar.dtype
    assert back.tobytes() == scalar.tobytes() or back == scalar


BASE = np.arange(4 * 6 * 8, dtype=np.int32).reshape(4, 6, 8)
LAYOUTS = {
    "transposed": BASE.T,
    "fortran": np.asfortranarray(BASE),
    "column": BASE[:, :, 3],
    "stepped": BASE[::2, ::-1, 1::3],
    "negative": BASE[::-1],
    "broadcast": np.broadcast_to(BASE[0, 0], (5, 8)),
    "one": BASE[1:2, 2:3, 3:4],
    "swapped": BASE.swapaxes(0, 1),
    "field": np.zeros(5, [("a", "i4"), ("b", "f8")])["b"],
    "unaligned": np.frombuffer(b"\0" * 41, np.uint8)[1:].view(np.float64),
    "window": np.lib.stride_tricks.sliding_window_view(np.arange(10), 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_packed_in_c_order(name):
    array = LAYOUTS[name]
    packed = split([array])
    assert packed.buffers[0].nbytes == array.nbytes
    assert_same(join(*packed)[0], np.ascontiguousarray(array).reshape(array.shape))


def test_a_view_is_sent_as_its_own_elements():
    big = np.zeros(1_000_000, np.float32)
    big[10:20] = range(10)
    packed = split({"a": {"b": big[10:20]}})
    assert packed.nbytes < 200
    assert join(*packed)["a"]["b"].tolist() == list(range(10))


def test_nothing_is_copied_on_either_side():
    array = np.arange(1000.0)
    packed = split({"x": array, "y": [array[10:]]})
    assert np.shares_memory(np.frombuffer(packed.buffers[0], np.uint8), array)
    received = [bytearray(buffer) for buffer in packed.buffers]
    back = join(packed.header, received)
    assert np.shares_memory(back["x"], np.frombuffer(received[0], np.uint8))


def test_arrays_are_as_writable_as_the_memory_they_arrive_in():
    header, buffers = split([np.arange(3)])
    data = bytearray(buffers[0])
    writable = join(header, [data])[0]
    writable[0] = 9
    assert data[0] == 9
    for memory in (bytes(data), memoryview(data).toreadonly()):
        frozen = join(header, [memory])[0]
        assert not frozen.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            frozen[0] = 1


def test_a_read_only_array_is_encoded_and_arrives_by_the_memory():
    array = np.arange(3)
    array.flags.writeable = False
    header, buffers = split(array)
    assert join(header, [bytearray(buffers[0])]).flags.writeable


def test_an_array_of_objects_is_walked():
    inner = np.arange(3.0)
    array = np.empty((2, 2), object)
    array[0, 0], array[0, 1], array[1, 0], array[1, 1] = inner, [1], "x", inner
    packed = split(array, allow_pickle=False)
    assert len(packed.buffers) == 1
    back = join(*packed, allow_pickle=False)
    assert back.shape == (2, 2)
    assert back.dtype == object
    assert (back[0, 0] == inner).all()
    assert back[0, 0] is back[1, 1]
    assert back[0, 1] == [1]
    for shape in ((), (0,), (0, 2)):
        empty = np.empty(shape, object)
        assert round_trip(empty).shape == shape
        assert round_trip(empty).dtype == object


def test_objects_inside_a_structured_array_are_refused():
    with pytest.raises(CodecError, match="holds objects"):
        split(np.zeros(2, [("a", object)]))


def test_subclasses_keep_their_class_by_pickling_and_maps_of_files_become_arrays(tmp_path):
    masked = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])
    back = round_trip(masked)
    assert type(back) is np.ma.MaskedArray
    assert (back == masked).all()
    records = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert type(round_trip(records)) is np.recarray
    assert round_trip(records[0]).b == 2.0
    mapped = np.memmap(tmp_path / "file", np.int16, "w+", shape=(3,))
    assert_same(round_trip(mapped), np.asarray(mapped))


def test_variable_width_strings_are_refused_with_the_cure():
    with pytest.raises(CodecError, match="astype"):
        split({"s": np.array(["a", "bbb"], np.dtypes.StringDType())})


def test_a_dtype_of_another_package_is_asked_for_by_name():
    from rlinf.comm.encoding.arrays import dtype_named, dtype_number
    from rlinf.comm.encoding.structure import DTYPES as NAMES

    if importlib.util.find_spec("ml_dtypes"):
        pytest.skip("ml_dtypes is installed")
    with pytest.raises(ValueError, match="needs the package ml_dtypes"):
        dtype_number(NAMES.index("bfloat16"), ())
    with pytest.raises(ValueError, match="needs the package ml_dtypes"):
        dtype_named('"ml_dtypes:int4"')


# -- memoryviews ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        memoryview(b""),
        memoryview(b"abc"),
        memoryview(bytearray(b"abcdef"))[::2],
        memoryview(np.arange(6, dtype=np.int16).reshape(2, 3)),
        memoryview(np.arange(6.0).reshape(2, 3).T),
        memoryview(np.array(3.5)),
        memoryview(np.zeros((0,), np.float32)),
        memoryview(np.zeros((0, 3), np.float32)),
    ],
)
def test_a_memoryview_arrives_as_one(view):
    back = round_trip([view])[0]
    assert type(back) is memoryview
    assert back.format == view.format
    assert back.shape == view.shape
    assert back.tolist() == view.tolist()


def test_a_memoryview_of_a_structure_is_refused():
    with pytest.raises(CodecError, match="format"):
        split([memoryview(np.zeros(2, [("a", "i4")]))])


# -- sharing --------------------------------------------------------------------------------------


def test_the_same_array_twice_is_one_array_sent_once():
    array = np.arange(1000)
    packed = split({"a": array, "b": [array]})
    assert len(packed.buffers) == 1
    back = join(*packed)
    assert back["a"] is back["b"][0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_an_array_and_views_of_it_share_memory_on_the_other_side(order):
    base = np.arange(12, dtype=np.int32).reshape(3, 4)
    parts = [base, base[1], base.reshape(-1)[2:4].view(np.uint8)]
    packed = split([parts[i] for i in order])
    assert [buffer.nbytes for buffer in packed.buffers] == [base.nbytes]
    back = dict(zip(order, join(packed.header, [bytearray(packed.buffers[0])]), strict=True))
    back[0][1, 0] = 77
    back[2][0] = 5
    assert back[1][0] == 77
    assert back[0][0, 2] == 5
    for i in order:
        assert back[i].shape == parts[i].shape
        assert back[i].dtype == parts[i].dtype


def test_views_that_overlap_in_part_or_with_gaps_arrive_apart():
    base = np.arange(12)
    for parts in ([base[:6], base[3:]], [base, base[::2]], [base, base[::-1]]):
        header, buffers = split(parts)
        back = join(header, [bytearray(buffer) for buffer in buffers])
        for one, other in zip(back, parts, strict=True):
            assert one.tolist() == other.tolist()
        assert not np.shares_memory(*back)


def test_views_side_by_side_are_sent_apart_without_their_base():
    base = np.arange(1200)
    packed = split([base[0:10], base[10:20], base[30:35]])
    assert [buffer.nbytes for buffer in packed.buffers] == [80, 80, 40]
    assert [part.tolist() for part in join(*packed)] == [
        base[0:10].tolist(),
        base[10:20].tolist(),
        base[30:35].tolist(),
    ]


def test_empty_views_of_one_base_do_not_matter():
    base = np.arange(4)
    back = round_trip([base, base[4:], base[0:0], base[2:2]])
    assert [part.size for part in back] == [4, 0, 0, 0]


def test_sharing_reaches_into_pickled_objects():
    class Holder:
        pass

    holder, base = Holder(), np.arange(10.0)
    holder.base, holder.part, holder.same = base, base[2:4], base
    packed = split([holder, base])
    assert [buffer.nbytes for buffer in packed.buffers] == [80]
    back = join(*packed)
    assert back[0].base is back[1] is back[0].same
    assert np.shares_memory(back[0].part, back[1])


def test_arrays_that_an_object_makes_while_it_is_pickled_are_right():
    values = [Maker(index) for index in range(20)]
    base = np.arange(5)
    back = round_trip([values, base, base[1:3]])
    assert [value.index for value in back[0]] == list(range(20))
    assert back[2].tolist() == [1, 2]


class Maker:
    """Gives pickle arrays that nobody else holds."""

    def __init__(self, index):
        self.index = index

    def __reduce__(self):
        array = np.full(3, self.index)
        return rebuilt, (array, array[1:])


def rebuilt(array, part):
    assert (array[1:] == part).all()
    return Maker(int(array[0]))


@dataclasses.dataclass
class Node:
    items: list
    next: "Node | None" = None


def test_containers_met_twice_are_one_and_circles_close():
    shared = {"k": [1]}
    back = round_trip([shared, (shared,), Node([shared["k"]])])
    assert back[0] is back[1][0]
    assert back[2].items[0] is back[0]["k"]
    node = Node([])
    node.next = node
    node.items.append((node,))
    back = round_trip({"node": node})["node"]
    assert back.next is back
    assert back.items[0][0] is back


def test_a_graph_of_shared_tuples_does_not_explode():
    value = ()
    for _ in range(90):
        value = (value, value)
    packed = split(value)
    assert len(packed.header) < 1000
    back = join(*packed)
    assert back[0] is back[1]


# -- other libraries ------------------------------------------------------------------------------


class Namespace:
    """An array library by the array API, as small as can be."""

    __name__ = "tiny_arrays"

    @staticmethod
    def asarray(value):
        return Tiny(np.asarray(value))


class Tiny:
    def __init__(self, host):
        self.host = host

    def __array_namespace__(self):
        return sys.modules["tiny_arrays"]

    def __dlpack__(self):
        return self.host.__dlpack__()

    def __array__(self, dtype=None, copy=None):
        return self.host


def test_arrays_of_other_libraries_by_the_array_api(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiny_arrays", Namespace())
    array = Tiny(np.arange(6.0).reshape(2, 3).T)
    packed = split({"a": array, "b": [array]}, allow_pickle=False)
    assert len(packed.buffers) == 1
    back = join(*packed, allow_pickle=False)
    assert type(back["a"]) is Tiny
    assert back["a"] is back["b"][0]
    assert back["a"].host.tolist() == array.host.tolist()
    monkeypatch.delitem(sys.modules, "tiny_arrays")
    with pytest.raises(CodecError, match="tiny_arrays"):
        join(*packed)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1])
def test_sizes_around_two_and_four_gib(size):
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
    array = np.frombuffer(memory, np.uint8)
    packed = split({"a": array, "b": [array[1:], np.zeros(3)]})
    assert packed.nbytes == size + 24 + len(packed.header)
    back = join(*packed)
    assert back["a"].nbytes == size
    assert back["b"][0].nbytes == size - 1
    assert back["b"][1].tolist() == [0, 0, 0]
    parts = split([array, memoryview(memory), bytes(600)])
    assert parts.nbytes == 2 * size + 600 + len(parts.header)
    assert join(*parts)[1].nbytes == size


def test_a_header_of_more_than_protobuf_takes_is_refused_with_the_cure():
    from rlinf.comm.encoding.writer import check_size

    check_size(2**31 - 1)
    for size in (2**31, 2**32, 2**32 + 1):
        with pytest.raises(CodecError, match="in an array"):
            check_size(size)


@pytest.mark.parametrize("layout", ["C", "F", "strided", "reversed"])
def test_a_large_array_known_by_its_header_is_like_the_first(layout):
    whole = np.arange(1 << 16, dtype=np.int32).reshape(256, 256)
    array = {"C": whole, "F": np.asfortranarray(whole), "strided": np.repeat(whole, 2, 1)[:, ::2],
             "reversed": np.flip(np.flip(whole))}[layout]  # fmt: skip
    first, second = (split(array) for _ in range(2))
    assert first.header == second.header
    assert bytes(first.buffers[0]) == bytes(second.buffers[0])
    for packed in (first, second):
        again = join(packed.header, [bytearray(packed.buffers[0])])
        assert np.array_equal(again, whole)
        assert again.flags.writeable
        assert not join(packed.header, [bytes(packed.buffers[0])]).flags.writeable


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, (1 << 18) + 1])
def test_a_header_that_is_known_does_not_excuse_a_buffer_of_another_size(size):
    header, _ = split(np.zeros(1 << 16, np.int32))
    with pytest.raises(CodecError):
        join(header, [bytearray(size)])
    with pytest.raises(CodecError):
        join(header, [bytearray(1 << 18)] * 2)


def test_large_arrays_of_one_size_keep_their_dtypes_apart():
    for dtype in ("<i4", ">i4", "<f4", "<u4", "S4", "M8[s]"):
        array = np.zeros((1 << 17) // np.dtype(dtype).itemsize * 2, dtype)
        for _ in range(2):
            again = round_trip(array)
            assert (again.dtype, again.shape) == (array.dtype, array.shape)

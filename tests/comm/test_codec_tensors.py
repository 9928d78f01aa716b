"""torch tensors: dtypes, layouts, flags, memory; torch stays unimported where it is not needed."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from rlinf.comm.codec import Parcel, join, split
from rlinf.comm.errors import CodecError

torch = pytest.importorskip("torch")

NAMES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
SHAPES = [(), (1,), (5,), (0,), (2, 3), (0, 3), (2, 1, 3, 2)]


def round_trip(value):
    header, buffers = split(value)
    return join(header, [bytearray(buffer) for buffer in buffers])


def raw(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def filled(shape, dtype):
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype):
    for shape in SHAPES:
        tensor = filled(shape, dtype)
        packed = split({"a": [tensor]}, allow_pickle=False)
        assert packed.buffers[0].nbytes == tensor.numel() * dtype.itemsize
        back = join(packed.header, [bytearray(packed.buffers[0])], allow_pickle=False)["a"][0]
        assert type(back) is torch.Tensor
        assert back.dtype is dtype
        assert back.shape == tensor.shape
        assert raw(back) == raw(tensor)


BASE = torch.arange(4 * 6 * 8, dtype=torch.bfloat16).view(4, 6, 8)
LAYOUTS = {
    "transposed": torch.arange(16.0).view(4, 4).T,
    "column": torch.tensor([[0, 1], [10, 11]])[:, 0],
    "stepped": BASE[::2, 1:, ::3],
    "permuted": BASE.permute(2, 0, 1),
    "expanded": torch.arange(3).expand(4, 3),
    "channels_last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "slice": BASE[1:3],
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "negated as half": torch._neg_view(torch.arange(3, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives_equal_in_c_order(name):
    tensor = LAYOUTS[name]
    packed = split([tensor])
    assert packed.buffers[0].nbytes == tensor.numel() * tensor.itemsize
    back = round_trip([tensor])[0]
    assert torch.equal(back, tensor)
    assert back.is_contiguous()
    assert not back.is_conj()
    assert not back.is_neg()


def test_a_view_is_sent_as_its_own_elements():
    big = torch.zeros(1_000_000)
    big[10:20] = torch.arange(10)
    packed = split({"a": {"b": big[10:20]}})
    assert packed.nbytes < 200
    assert round_trip({"b": big[10:20]})["b"].tolist() == list(range(10))


def test_nothing_is_copied_on_either_side_of_writable_memory():
    for tensor in (torch.arange(100.0), torch.arange(100.0).bfloat16(), torch.zeros(4, dtype=bool)):
        packed = split([tensor])
        memory = bytearray(packed.buffers[0])
        back = join(packed.header, [memory])[0]
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        assert back.data_ptr() == address
        tensor.fill_(1)
        assert bytes(packed.buffers[0]) == np.frombuffer(bytes(raw(tensor)), np.uint8).tobytes()


def test_a_tensor_over_read_only_memory_is_a_private_copy_that_may_be_written():
    header, buffers = split({"t": torch.arange(4), "same": [torch.arange(2)]})
    memory = [bytes(buffer) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = join(header, memory)
    back["t"].fill_(7)
    assert join(header, memory)["t"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_tensor_and_views_of_it_share_memory_on_the_other_side(kind):
    base = torch.arange(12.0).view(3, 4)
    tied = base.detach()
    packed = split({"row": base[1], "base": base, "tied": tied, "again": base})
    assert [buffer.nbytes for buffer in packed.buffers] == [48]
    back = join(packed.header, [kind(packed.buffers[0])])
    assert back["again"] is back["base"]
    back["base"][1, 0] = 99
    assert back["row"][0] == 99
    assert back["tied"][1, 0] == 99


def test_views_that_overlap_in_part_or_with_gaps_arrive_apart():
    base = torch.arange(12)
    for parts in ([base[:6], base[3:]], [base, base[::2]], [base.view(3, 4), base.view(3, 4).T]):
        back = round_trip(parts)
        assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))
        back[0].fill_(-1)
        assert torch.equal(back[1], parts[1])


def test_a_tensor_of_a_numpy_array_is_sent_apart_from_it():
    array = np.arange(4.0)
    back = round_trip([array, torch.from_numpy(array)])
    back[0][0] = 5
    assert back[1].tolist() == [0, 1, 2, 3]


# -- flags ----------------------------------------------------------------------------------------


def test_a_leaf_keeps_requires_grad_and_a_result_arrives_detached():
    leaf = torch.arange(3.0, requires_grad=True)
    result = leaf * 2
    back = round_trip([leaf, result, leaf.detach(), result.bfloat16()])
    assert [tensor.requires_grad for tensor in back] == [True, False, False, False]
    assert all(tensor.is_leaf and tensor.grad_fn is None for tensor in back)
    back[0].sum().backward()
    assert back[0].grad.tolist() == [1, 1, 1]
    assert leaf.grad is None


def test_a_parameter_stays_one():
    for grad in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=grad)
            back = round_trip({"p": parameter})["p"]
            assert type(back) is torch.nn.Parameter
            assert back.requires_grad is grad
            assert back.dtype is dtype


def test_a_module_and_its_state_travel_without_pickling_tensors():
    module = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.LayerNorm(100))
    module[1].weight = torch.nn.Parameter(module[0].bias.detach())  # tied, by memory only
    packed = split(module)
    assert len(packed.header) < 4000
    assert sum(buffer.nbytes for buffer in packed.buffers) == 4 * (100 * 100 + 2 * 100)
    back = round_trip(module)
    assert torch.equal(back[0].weight, module[0].weight)
    assert isinstance(back[0].weight, torch.nn.Parameter)
    assert back[1].weight.data_ptr() == back[0].bias.data_ptr()
    state = module.state_dict()
    assert split(state, allow_pickle=False).nbytes < 4 * (100 * 100 + 2 * 100) + 1000
    back = round_trip(state)
    assert back._metadata == state._metadata
    assert module.load_state_dict(back)


# -- what is pickled ------------------------------------------------------------------------------


class Marked(torch.Tensor):
    pass


def test_subclasses_and_other_layouts_are_pickled():
    marked = torch.arange(3.0).as_subclass(Marked)
    back = round_trip([marked])[0]
    assert type(back) is Marked
    assert back.tolist() == [0, 1, 2]
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(round_trip([sparse])[0].to_dense(), torch.eye(3))
    meta = torch.empty(3, device="meta")
    assert round_trip([meta])[0].is_meta
    assert round_trip([torch.Size([1, 2]), torch.float16, torch.device("cpu")]) == [
        torch.Size([1, 2]),
        torch.float16,
        torch.device("cpu"),
    ]
    for refused in (marked, sparse, meta):
        with pytest.raises(CodecError, match=r"\$\.t: .*pickling, which is off"):
            split({"t": refused}, allow_pickle=False)


# -- parcels --------------------------------------------------------------------------------------


def test_a_parcel_is_forwarded_closed_and_opened_at_the_end():
    item = {"t": torch.arange(1000.0), "n": np.arange(10), "s": "text"}
    parcel = Parcel.pack(item)
    assert parcel.nbytes == len(parcel.header) + 4000 + 80
    packed = split({"items": [parcel, parcel], "id": 1}, allow_pickle=False)
    assert len(packed.buffers) == 2
    received = [bytearray(buffer) for buffer in packed.buffers]
    middle = join(packed.header, received)
    closed = middle["items"][0]
    assert type(closed) is Parcel
    assert closed is middle["items"][1]
    assert closed.header == parcel.header
    forwarded = split([closed])
    assert np.shares_memory(forwarded.buffers[0], np.frombuffer(received[0], np.uint8))
    back = join(forwarded.header, [bytearray(buffer) for buffer in forwarded.buffers])[0].open()
    assert torch.equal(back["t"], item["t"])
    assert back["n"].tolist() == list(range(10))
    assert back["s"] == "text"


def test_a_parcel_inside_a_pickled_object_stays_closed():
    class Holder:
        pass

    holder = Holder()
    holder.parcel = Parcel.pack([1, np.zeros(1000)])
    back = round_trip(holder)
    assert back.parcel.nbytes == holder.parcel.nbytes
    assert back.parcel.open()[0] == 1


def test_a_parcel_refuses_pickles_where_told():
    parcel = Parcel.pack({"f": len})
    with pytest.raises(CodecError, match=r"\$\.f is pickled"):
        parcel.open(allow_pickle=False)
    with pytest.raises(CodecError, match=r"\$\.f"):
        Parcel.pack({"f": len}, allow_pickle=False)
    import pickle

    assert pickle.loads(pickle.dumps(parcel)).open() == {"f": len}


# -- imports --------------------------------------------------------------------------------------


def test_torch_is_imported_only_where_a_tensor_arrives():
    program = """
import sys
from rlinf.comm.codec import join, split
import numpy as np
packed = split({"a": np.zeros(3), "b": [1, object, {2}]})
join(*packed)
assert "torch" not in sys.modules
header, buffer = (bytes.fromhex(text) for text in sys.argv[1:])
assert join(header, [bytearray(buffer)])["t"].sum() == 6
assert "torch" in sys.modules
"""
    header, (buffer,) = split({"t": torch.arange(4)})
    command = [sys.executable, "-c", program, header.hex(), bytes(buffer).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda device")
def test_a_tensor_on_a_device_arrives_on_one():
    tensor = torch.arange(6.0, device="cuda").view(2, 3).T.bfloat16()
    parameter = torch.nn.Parameter(torch.zeros(2, device="cuda"))
    back = round_trip([tensor, parameter, tensor])
    assert back[0].is_cuda
    assert torch.equal(back[0], tensor)
    assert back[0] is back[2]
    assert type(back[1]) is torch.nn.Parameter
    assert back[1].is_cuda
    assert back[1].requires_grad

"""Awkward payloads over every transport: what the codec promises holds through an endpoint."""

import dataclasses

import numpy as np
import pytest

from rlinf.comm import CommConfig, Endpoint, MemoryRegistry, Parcel

torch = pytest.importorskip("torch")


@dataclasses.dataclass
class Batch:
    tokens: list
    reward: float
    tensors: dict


@pytest.fixture(params=["inproc", "shm", "tcp"])
def pair(request):
    config = CommConfig(backend_priority=(request.param,), connection_timeout_s=20.0)
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        a.send(None, "b/0")
        b.recv("a/0")
        assert a.statistics().connections == {"b/0": request.param}
        yield a, b


def send(pair, value):
    a, b = pair
    a.send(value, "b/0")
    return b.recv("a/0")


DTYPES = ["bool", "uint16", "int64", "bfloat16", "float8_e4m3fn", "complex64"]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_and_shapes(pair, name):
    dtype = getattr(torch, name)
    tensors = [torch.ones(shape).to(dtype) for shape in ((), (0,), (3,), (2, 5), (100, 400))]
    for back, tensor in zip(send(pair, tensors), tensors, strict=True):
        assert back.dtype is tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


def test_layouts(pair):
    square = torch.arange(16.0).view(4, 4)
    values = [square.T, square[:, 1], square[::2, ::2], np.asfortranarray(np.eye(300))]
    back = send(pair, values)
    assert all(torch.equal(one, other) for one, other in zip(back[:3], values[:3], strict=True))
    assert (back[3] == values[3]).all()


def test_a_view_costs_its_own_bytes(pair):
    big = torch.zeros(1_000_000)
    before = pair[0].statistics().sent_bytes
    send(pair, {"nested": {"view": big[:10]}})
    assert pair[0].statistics().sent_bytes - before < 1000


def test_nested_values(pair):
    value = Batch([1, 2, 2**70], 0.5, {"a": {"b": torch.arange(4)}, "n": None, "l": [{}, {"x": 1}]})
    back = send(pair, value)
    assert (back.tokens, back.reward) == (value.tokens, value.reward)
    assert back.tensors["a"]["b"].tolist() == [0, 1, 2, 3]
    assert back.tensors["l"] == [{}, {"x": 1}]


@pytest.mark.parametrize("size", [4, 100_000])
def test_shared_memory_within_a_message_is_shared_again(pair, size):
    base = torch.arange(float(size))
    back = send(pair, [base, base[1:3], base])
    assert back[0] is back[2]
    back[0][1] = -1
    assert back[1][0] == -1
    assert base[1] == 1


@pytest.mark.parametrize("size", [4, 100_000])
def test_what_is_received_may_be_written_to_and_is_nobody_elses(pair, size):
    a, _ = pair
    array = np.arange(size)
    ready = a.empty((size,), np.int64)
    ready[...] = array
    for value in (array, ready, torch.from_numpy(array)):
        for _ in range(5):
            back = send(pair, [value])[0]
            assert back[-1] == size - 1
            back[...] = -1
            assert value[-1] == size - 1
            del back


def test_a_parcel_passes_through_a_middleman_closed(pair):
    a, b = pair
    a.send(Parcel.pack({"x": torch.arange(50_000)}), "b/0")
    b.send({"item": b.recv("a/0"), "id": 5}, "a/0")
    back = a.recv("b/0")
    assert back["id"] == 5
    assert back["item"].open()["x"][-1] == 49_999


def test_ten_thousand_small_messages_arrive_in_order(pair):
    a, b = pair
    for start in range(0, 10_000, 1000):
        for number in range(start, start + 1000):
            a.isend((number, b"x" * 80), "b/0")
        for number in range(start, start + 1000):
            assert b.recv("a/0")[0] == number

"""Arrays of other libraries, receives into memory that is there, codecs, very large messages."""

import importlib.metadata
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlinf.comm import (
    CodecError,
    Coded,
    CommConfig,
    Endpoint,
    MemoryRegistry,
    MessageMismatch,
    join,
    split,
)
from rlinf.comm.encoding.coded import codec_named
from rlinf.comm.patches import PackedPatches, Patches


def round_trip(value, **kwargs):
    header, buffers = split(value, **kwargs)
    return join(header, [bytearray(buffer) for buffer in buffers], **kwargs)


@pytest.fixture
def pair():
    registry = MemoryRegistry()
    config = CommConfig(connection_timeout_s=30.0)
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        yield a, b


# -- libraries -------------------------------------------------------------------------------------


def test_jax_arrays_come_back_as_jax_arrays():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    values = {
        "bf16": jnp.ones((3, 4), jnp.bfloat16),
        "scalar": jnp.array(2.5),
        "empty": jnp.zeros((0, 3)),
        "transposed": jnp.arange(6).reshape(2, 3).T,
        "complex": jnp.array([1 + 2j]),
        "fp8": jnp.ones(3, jnp.float8_e4m3fn),
    }
    back = round_trip(values, allow_pickle=False)
    for name, value in values.items():
        assert type(back[name]) is type(value)
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert (back[name] == value).all()
    with pytest.raises(CodecError, match=r"\$.key: .*key_data"):
        split({"key": jax.random.key(1)})


def test_a_jax_array_is_not_copied_to_be_sent():
    jnp = pytest.importorskip("jax").numpy
    value = jnp.arange(100_000)
    (buffer,) = split(value).buffers
    assert np.frombuffer(buffer, np.int32).ctypes.data == np.asarray(value).ctypes.data


def test_tensorflow_tensors_come_back_as_tensorflow_tensors():
    tensorflow = pytest.importorskip("tensorflow")
    for value in (
        tensorflow.constant([[1.0, 2.0]]),
        tensorflow.cast([1, 2, 3], tensorflow.bfloat16),
        tensorflow.constant(3),
    ):
        back = round_trip(value, allow_pickle=False)
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert (back.numpy() == value.numpy()).all()
    with pytest.raises(CodecError, match="objects"):
        split(tensorflow.constant(["text"]))


class EagerTensor:
    """Looks as TensorFlow's does to the codec."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


EagerTensor.__module__ = "tensorflow.python.framework.ops"


def test_what_is_asked_of_tensorflow(monkeypatch):
    fake = types.ModuleType("tensorflow")
    fake.convert_to_tensor = EagerTensor
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    back = round_trip({"t": EagerTensor(np.ones((2, 3)))}, allow_pickle=False)["t"]
    assert type(back) is EagerTensor
    assert back.array.shape == (2, 3)


class Dlpack:
    """An array of a library that numpy knows nothing of but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return sys.modules["dlpack_library"]


def test_any_array_with_dlpack(monkeypatch):
    library = types.ModuleType("dlpack_library")
    library.asarray = Dlpack
    monkeypatch.setitem(sys.modules, "dlpack_library", library)
    back = round_trip([Dlpack(np.arange(6.0).reshape(2, 3))])[0]
    assert type(back) is Dlpack
    assert back.array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_pyarrow_buffers_travel_out_of_band():
    pyarrow = pytest.importorskip("pyarrow")
    values = [
        pyarrow.py_buffer(b"x" * 100_000),
        pyarrow.array(range(10_000)),
        pyarrow.table({"a": list(range(5000)), "b": ["text"] * 5000}),
        pyarrow.record_batch({"a": pyarrow.array([1.5, None])}),
    ]
    header, buffers = split(values)
    assert len(header) < 20_000
    assert sum(buffer.nbytes for buffer in buffers) > 200_000
    for back, value in zip(join(header, buffers), values, strict=True):
        assert back.equals(value)


# -- out= ------------------------------------------------------------------------------------------


def test_receiving_into_arrays_that_are_there(pair):
    torch = pytest.importorskip("torch")
    a, b = pair
    out = {"x": np.zeros((3, 4)), "t": [torch.zeros(5, dtype=torch.bfloat16, requires_grad=True)]}
    kept = out["x"]
    a.send({"x": np.ones((3, 4)), "t": [torch.ones(5, dtype=torch.bfloat16)]}, "b/0")
    assert b.recv("a/0", out=out) is out
    assert (kept == 1).all()
    assert (out["t"][0] == 1).all()
    column = np.zeros((4, 3))
    a.send(np.arange(4.0), "b/0")
    b.recv("a/0", out=column[:, 1])
    assert column.sum() == column[:, 1].sum() == 6


@pytest.mark.parametrize(
    ("out", "sent", "message"),
    [
        (np.ones(8, "f4"), np.zeros(4, "f4"), r"float32 \(8,\), and a/0 sent .*float32 \(4,\)"),
        (np.ones(2, "i4"), np.zeros(2, "f4"), r"int32 \(2,\), and a/0 sent .*float32"),
        (np.ones((2, 3)), np.zeros((3, 2)), r"\(2, 3\), and a/0 sent .*\(3, 2\)"),
        ({"a": np.ones(1)}, {"b": np.zeros(1)}, r"keys \['a'\].*keys \['b'\]"),
        ([np.ones(1)], [np.zeros(1), 2], "1 items, and a/0 sent 2 items"),
        ({"x": [np.ones(1), np.ones(2)]}, {"x": [np.zeros(1), "no"]}, r"out\['x'\]\[1\] .* a str"),
        (np.ones(1), 3, "a numpy array .* sent a int"),
    ],
)
def test_what_does_not_fit_is_an_error_and_changes_nothing(pair, out, sent, message):
    a, b = pair
    a.send(sent, "b/0")
    with pytest.raises(MessageMismatch, match=message) as caught:
        b.recv("a/0", out=out)
    assert str(caught.value.peer) == "a/0"
    for array in out if isinstance(out, list) else [out]:
        assert not isinstance(array, np.ndarray) or (array == 1).all()
    a.send("next", "b/0")
    assert b.recv("a/0") == "next"


def test_tensors_and_arrays_are_not_mixed(pair):
    torch = pytest.importorskip("torch")
    a, b = pair
    a.send(np.zeros(3, "f4"), "b/0")
    with pytest.raises(MessageMismatch, match=r"a tensor of torch.float32 .* a numpy array"):
        b.recv("a/0", out=torch.zeros(3))
    a.send(1, "b/0")
    with pytest.raises(TypeError, match="cannot be received into"):
        b.recv("a/0", out="text")


# -- codecs ----------------------------------------------------------------------------------------


def frames(seed=0, times=6, height=50, width=43):
    """A still background with a square that moves, and one frame of noise."""
    rng = np.random.default_rng(seed)
    video = np.repeat(rng.integers(0, 255, (1, height, width, 3), np.uint8), times, axis=0)
    video[:, : height // 2] = 200
    for time in range(times):
        video[time, 20 + time : 28 + time, 5:13] = (255, 0, 0)
    return video


@pytest.mark.parametrize("codec", ["patches", "patches_zlib"])
def test_frames_come_back_bit_for_bit_in_fewer_bytes(pair, codec):
    a, b = pair
    video = frames()
    before = a.statistics().sent_bytes
    a.send({"frames": Coded(video, codec), "reward": 1.0}, "b/0")
    got = b.recv("a/0")
    assert got["reward"] == 1.0
    assert got["frames"].dtype == np.uint8
    assert (got["frames"] == video).all()
    assert a.statistics().sent_bytes - before < video.nbytes / 2


@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.float32, np.int64, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=11),
    ),
    st.sampled_from([Patches(), PackedPatches()]),
)
def test_every_array_comes_back_from_patches(array, codec):
    back = codec.decode(memoryview(codec.encode(array)), array.shape, array.dtype)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(st.binary(max_size=300), st.integers(0, 200), st.booleans())
def test_malformed_patches_are_an_error(noise, cut, packed):
    codec = PackedPatches() if packed else Patches()
    video = frames(times=2, height=9, width=10)
    good = codec.encode(video)
    for data in (noise, good[:cut], good[:cut] + noise, good[: -cut or None]):
        try:
            got = codec.decode(memoryview(data), video.shape, video.dtype)
        except ValueError:
            continue
        assert got.shape == video.shape


def test_an_encoding_that_claims_to_be_much_larger_is_refused():
    header, buffers = split(Coded(np.zeros((4, 640, 640, 3), np.uint8), "patches"))
    with pytest.raises(CodecError, match="from 0 bytes"):
        join(header, [b""])
    assert (join(header, buffers) == 0).all()


def test_a_codec_that_is_not_there_is_named():
    with pytest.raises(CodecError, match="no codec 'absent' is installed here; there are patches"):
        split({"x": Coded(np.zeros(3), "absent")})
    with pytest.raises(CodecError, match=r"\$.x: an array of object"):
        split({"x": Coded(np.array([None]), "patches")})


class Negated:
    def encode(self, array):
        return (255 - array).tobytes()

    def decode(self, data, shape, dtype):
        return 255 - np.frombuffer(data, dtype).reshape(shape)


def test_a_codec_of_a_third_party_by_entry_point(monkeypatch):
    point = importlib.metadata.EntryPoint("negated", f"{__name__}:Negated", "rlinf.codecs")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or this_module())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    codec_named.cache_clear()
    try:
        assert (round_trip(Coded(np.arange(9, dtype=np.uint8), "negated")) == np.arange(9)).all()
    finally:
        codec_named.cache_clear()


def this_module():
    module = types.ModuleType(__name__)
    module.Negated = Negated
    return module


# -- sizes -----------------------------------------------------------------------------------------


class Huge:
    """A buffer that only says how large it is."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40])
def test_sizes_beyond_31_and_32_bits_are_written_in_full(nbytes):
    import struct

    from rlinf.comm.frame import INLINE, PLACED, PREFIX, Outgoing
    from rlinf.comm.transports.send_queue import Encoder

    frame = Outgoing(10, b"h", [Huge(nbytes), Huge(5)])
    assert frame.nbytes == nbytes + 6
    head = Encoder().head(frame)
    assert struct.unpack_from("<2Q", head, PREFIX.size) == (nbytes, 5)
    assert PLACED.unpack(PLACED.pack(1, nbytes, nbytes, 3)) == (1, nbytes, nbytes, 3)
    assert INLINE.unpack(INLINE.pack(nbytes)) == (nbytes,)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_message_of_more_than_4_gib(transport):
    """One array over 2**32 bytes, allocated where it is sent from (shm) or by the receiver."""
    import psutil

    from rlinf.comm import RegistryServer
    from rlinf.comm.testing import PeerProcess

    size = (1 << 32) + (1 << 20)
    if psutil.virtual_memory().available < 2.5 * size:
        pytest.skip("needs 11 GB of free memory")
    config = CommConfig(
        backend_priority=(transport,), connection_timeout_s=200.0, pool_bytes=5 << 30
    )
    with (
        RegistryServer() as registry,
        Endpoint("test/0", registry=registry, config=config) as me,
        PeerProcess("peer/0", registry, look_at_the_ends, config=config) as peer,
    ):
        data = me.empty(size, np.uint8) if transport == "shm" else np.zeros(size, np.uint8)
        data[:10], data[-10:], data[1 << 32] = 1, 2, 3
        me.send({"data": data}, "peer/0")
        assert me.recv("peer/0") == (size, 1, 2, 3)
        del data
        assert peer.join() == 0


def look_at_the_ends(endpoint):
    data = endpoint.recv("test/0")["data"]
    ends = (data.nbytes, int(data[9]), int(data[-10]), int(data[1 << 32]))
    del data
    endpoint.send(ends, "test/0")

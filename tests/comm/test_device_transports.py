"""The device transports: their logic with a fake device here, the real ones where there is a GPU.

The fakes come from a package of transports that is found by its entry points, as a third party's.
"""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from rlinf.comm import CommConfig, Endpoint, MemoryRegistry, PeerLost, PoolExhausted
from rlinf.comm.device import Device
from rlinf.comm.plugins import transports
from rlinf.comm.testing import PeerProcess, TransportTests, eventually, parrot
from rlinf.comm.transports.carrier import Notes
from rlinf.comm.transports.cuda_ipc import CudaIpcTransport, Segments
from rlinf.comm.transports.nccl import NcclTransport

torch = pytest.importorskip("torch")
PLUGINS = str(Path(__file__).parent / "plugins")
FAKES = ("fake_nccl", "fake_cuda_ipc")


@pytest.fixture(autouse=True, scope="module")
def plugins():
    """The package is on the path: of this process, and so of those it spawns."""
    sys.path.insert(0, PLUGINS)
    transports.cache_clear()
    yield
    sys.path.remove(PLUGINS)
    transports.cache_clear()


class TestPathway(TransportTests):
    """A third party's transport, by the shipped suite."""

    transport = "pathway"


@pytest.mark.slow
class TestFakeNccl(TransportTests):
    transport = "fake_nccl"


@pytest.mark.slow
class TestFakeCudaIpc(TransportTests):
    transport = "fake_cuda_ipc"


def test_a_plugin_that_cannot_be_loaded_is_missing_with_its_reason():
    usable, missing = transports()
    assert "pathway" in usable
    assert missing["broken"].startswith("not importable: No module named")


def config(name, **values):
    return CommConfig(backend_priority=(name,), connection_timeout_s=30.0, **values)


@pytest.fixture(params=[*FAKES, "gloo"])
def name(request):
    return request.param


@pytest.fixture
def pair(name, monkeypatch):
    """Two endpoints of one process, which would talk in process otherwise."""
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config(name)) as a,
        Endpoint("b/0", registry=registry, config=config(name)) as b,
    ):
        yield a, b


def send(pair, value):
    a, b = pair
    handle = b.irecv("a/0")
    a.send(value, "b/0")
    return handle.result()


def test_tensors_of_all_kinds_go_beside_the_connection(pair, name):
    square = torch.arange(16.0).view(4, 4)
    parameter = torch.nn.Parameter(torch.ones(3))
    value = {
        "t": square.T,
        "column": square[:, 1],
        "bf16": torch.ones(5, 7, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "conj": torch.tensor([1 + 2j]).conj(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "parameter": parameter,
        "same": [square, square],
        "numpy": np.arange(100_000),
        "text": "x" * 10_000,
    }
    back = send(pair, value)
    assert pair[0].statistics().connections == {"b/0": name}
    assert list(back) == list(value)
    for key in ("t", "column", "bf16", "bool", "conj", "scalar", "empty"):
        assert back[key].dtype == value[key].dtype
        assert back[key].shape == value[key].shape
        assert torch.equal(back[key], value[key])
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert back["parameter"].requires_grad
    assert back["same"][0] is back["same"][1]
    assert (back["numpy"] == value["numpy"]).all()
    back["t"][0, 0] = 99.0
    assert square[0, 0] == 0


def test_order_is_kept_between_what_is_carried_and_what_is_not(pair):
    a, b = pair
    for number in range(60):
        a.isend(torch.full((50_000,), number) if number % 3 == 0 else number, "b/0")
    for number in range(60):
        got = b.recv("a/0")
        assert (got if isinstance(got, int) else int(got[0])) == number


def test_a_tensor_sent_without_waiting_may_be_changed_at_once(pair):
    a, b = pair
    send(pair, 0)
    data = torch.zeros(100_000)
    handles = []
    for value in range(4):
        data.fill_(value)
        handles.append(a.isend(data, "b/0"))
        data.fill_(-1)
    for value in range(4):
        assert (b.recv("a/0") == value).all()
    for handle in handles:
        handle.wait()


def test_calls_and_broadcasts_carry_tensors(pair):
    a, b = pair
    b.serve("double", lambda request: request.reply(request.payload * 2))
    assert (a.call("double", torch.ones(10_000), to="b/0").result() == 2).all()
    a.broadcast(torch.ones(10_000), ["b/0", "a/0"])
    assert b.recv("a/0").sum() == a.recv("a/0").sum() == 10_000


def test_a_peer_without_the_transport_gets_the_tensors_by_the_host(name):
    registry = MemoryRegistry()
    tcp = CommConfig(backend_priority=("tcp",))
    with (
        Endpoint("a/0", registry=registry, config=config(name)) as a,
        Endpoint("b/0", registry=registry, config=tcp) as b,
    ):
        b.send(torch.ones(10_000), "a/0")
        assert a.recv("b/0").sum() == 10_000
        a.send([torch.ones(10_000), torch.nn.Parameter(torch.ones(2))], "b/0")
        tensor, parameter = b.recv("a/0")
        assert tensor.sum() == 10_000
        assert parameter.requires_grad


def test_a_message_larger_than_allowed_is_refused(name):
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config(name)) as a,
        Endpoint("b/0", registry=registry, config=config(name, max_message_bytes=1 << 20)) as b,
    ):
        a.send(1, "b/0")
        assert b.recv("a/0") == 1
        asked = b.irecv("a/0")
        a.isend(torch.zeros(2 << 20, dtype=torch.uint8), "b/0")
        with pytest.raises(PeerLost, match="max_message_bytes"):
            asked.result()


def test_a_carrier_that_fails_is_an_error_and_later_messages_go_through(monkeypatch):
    """It ends its connection, with the reason; nobody waits for ever for its thread."""
    from example_transports.fakes import FakeCommunicator

    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config("fake_nccl")) as a,
        Endpoint("b/0", registry=registry, config=config("fake_nccl")) as b,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(FakeCommunicator, "receive", lambda self, nbytes: 1 / 0)
            asked = b.irecv("a/0")
            a.isend(torch.ones(1000), "b/0")
            with pytest.raises(PeerLost, match="fake_nccl: division by zero"):
                asked.result()
        eventually(lambda: not a.statistics().connections)
        assert send((a, b), torch.ones(1000)).sum() == 1000


def test_memory_is_flat_over_fifty_cycles_and_exports_meet_imports():
    """What is exported is opened once, read as often as it is written, and freed at the end."""
    from example_transports.fakes import FakeCuda

    registry = MemoryRegistry()
    begin = FakeCuda.exports
    with (
        Endpoint("a/0", registry=registry, config=config("fake_cuda_ipc")) as a,
        Endpoint("b/0", registry=registry, config=config("fake_cuda_ipc")) as b,
    ):
        weights = {f"layer{n}": torch.full((1000, 10 * n), float(n)) for n in range(1, 6)}
        for _ in range(50):
            assert (send((a, b), weights)["layer5"] == 5).all()
        made = FakeCuda.exports - begin
        assert made <= 2 * len(weights)
        assert FakeCuda.exported == FakeCuda.opened == made
    eventually(lambda: FakeCuda.exported == FakeCuda.opened == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAKES)
def test_a_peer_killed_with_a_tensor_under_way(name):
    from rlinf.comm import RegistryServer

    with (
        RegistryServer() as registry,
        Endpoint("test/0", registry=registry, config=config(name)) as me,
        PeerProcess("peer/0", registry, parrot, config=config(name)) as peer,
    ):
        me.send(torch.ones(10), "peer/0")
        assert me.recv("peer/0", tag=100).sum() == 10
        for _ in range(20):
            me.isend(torch.ones(1_000_000), "peer/0", tag=1)
        peer.kill()
        with pytest.raises(PeerLost, match="peer/0"):
            while True:
                assert me.recv("peer/0", tag=101).sum() == 1_000_000


class FakeSegment:
    def __init__(self, size):
        self.size, self.freed = size, False

    def free(self):
        assert not self.freed
        self.freed = True


def test_segments_are_reused_and_bounded():
    told = []
    segments = Segments(FakeSegment, told.append, limit_bytes=1 << 20, timeout_s=0.05)
    one, size, first = segments.take(100_000)
    assert size == 1 << 17
    segments.give_back(one)
    assert segments.take(120_000)[2] is first
    assert segments.counts() == (1, 1)
    big, _, _ = segments.take(400_000)
    with pytest.raises(PoolExhausted, match="2 segments not read yet"):
        segments.take(600_000)
    segments.give_back(big)
    with pytest.raises(PoolExhausted):  # the other side was asked to close it, and did not yet
        segments.take(600_000)
    assert told == [big]
    segments.closed(big)
    assert segments.counts() == (1, 1)
    segments.give_back(one)
    segments.close()
    assert first.freed
    assert segments.nbytes == 0


def test_a_buffer_larger_than_the_bound_goes_alone():
    segments = Segments(FakeSegment, lambda number: None, limit_bytes=1 << 16, timeout_s=0.05)
    number, _, _ = segments.take(1 << 20)
    with pytest.raises(PoolExhausted):
        segments.take(100)
    segments.give_back(number)


def test_notes_wait_and_give_up():
    told = []
    notes = Notes(told.append, timeout_s=0.05)
    notes.set("key", b"value")
    assert notes.get("key") == b"value"
    other = Notes(told.append, timeout_s=0.05)
    other.heard(told[0])
    assert other.get("key", forget=True) == b"value"
    with pytest.raises(TimeoutError, match="did not say 'key'"):
        other.get("key")
    other.close()
    with pytest.raises(TimeoutError, match="the connection is gone"):
        other.get("key")


def test_what_is_missing_is_said():
    assert CudaIpcTransport.unsuited(Device("cpu"), CommConfig()) == "the worker is on cpu"
    usable, missing = transports()
    for kind in (NcclTransport, CudaIpcTransport):
        assert kind.name in usable or missing[kind.name] == kind.missing()


def test_the_reason_is_logged_once_a_pair(caplog):
    registry = MemoryRegistry()
    with (
        caplog.at_level(logging.INFO, "rlinf"),
        Endpoint("a/0", registry=registry, config=config("pathway")) as a,
        Endpoint("b/0", registry=registry) as b,
    ):
        for _ in range(3):
            a.send(1, "b/0")
            b.recv("a/0")
        said = [r.getMessage() for r in caplog.records if "a/0 - b/0" in r.getMessage()]
    assert said == [
        "a/0 - b/0 over pathway: preferred by backend_priority; both are in the same process"
    ]


def on_gpus(rank):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch sees none")
    return Device("cuda", rank % torch.cuda.device_count())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_tensors_between_real_gpus(name):
    """Two processes; nccl needs two GPUs, cuda_ipc one."""
    from rlinf.comm import RegistryServer

    here, there = on_gpus(0), on_gpus(1)
    if name == "nccl" and here == there:
        pytest.skip("nccl needs two GPUs")
    with (
        RegistryServer() as registry,
        Endpoint("test/0", registry=registry, config=config(name), device=here) as me,
        PeerProcess("peer/0", registry, gpu_parrot, there.index, config=config(name)),
    ):
        assert me.recv("peer/1") == "ready"
        before = torch.cuda.mem_get_info()[0]
        for cycle in range(50):
            sent = torch.full((1 << 20,), float(cycle), device=f"cuda:{here.index}")
            me.send(sent, "peer/1")
            got = me.recv("peer/1")
            assert got.is_cuda
            assert torch.equal(got, sent + 1)
        assert me.statistics().connections["peer/1"] == name
        assert before - torch.cuda.mem_get_info()[0] < 256 << 20
        me.send(None, "peer/1")


def gpu_parrot(endpoint, index):
    settings = endpoint.config
    with Endpoint(
        "peer/1", registry=endpoint.registry, config=settings, device=Device("cuda", index)
    ) as me:
        me.send("ready", "test/0")
        while (got := me.recv("test/0")) is not None:
            me.send(got + 1, "test/0")

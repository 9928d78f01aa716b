"""WorkerId, Address, Device: what they accept, and that they round-trip."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.comm.address import Address, WorkerId
from rlinf.comm.device import Device, Locality, locality
from rlinf.comm.registry import WorkerRecord

GROUPS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(GROUPS, st.integers(0, 10**9))
def test_a_worker_id_round_trips(group, rank):
    worker = WorkerId(group, rank)
    assert WorkerId.parse(str(worker)) == worker
    assert WorkerId.parse(worker) is worker
    assert pickle.loads(pickle.dumps(worker)) == worker


@pytest.mark.parametrize(
    "text",
    [
        *("", "rollout", "rollout/", "/3", "rollout/-1", "rollout/+1", "rollout/03", "rollout/1."),
        *("a b/1", "a/b/1", "rollout/١", ".hidden/0", "rollout/ 1", "rollout\n/1"),
    ],
)
def test_what_is_no_worker_id_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="group"):
        WorkerId.parse(text)


@pytest.mark.parametrize("rank", [-1, True, 1.0, "1"])
def test_a_rank_is_an_int(rank):
    with pytest.raises(ValueError, match="rank"):
        WorkerId("rollout", rank)


def test_worker_ids_are_ordered_by_rank_as_a_number():
    ids = [WorkerId.parse(text) for text in ("b/0", "a/10", "a/9")]
    assert [str(worker) for worker in sorted(ids)] == ["a/9", "a/10", "b/0"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.1:4000", Address("tcp", "10.0.0.1", 4000)),
        ("tcp://[::1]:80", Address("tcp", "::1", 80)),
        ("tcp://[fe80::1%eth0]:80", Address("tcp", "fe80::1%eth0", 80)),
        ("tcp://node-3.cluster:65535", Address("tcp", "node-3.cluster", 65535)),
        ("unix://@rlinf-77", Address("unix", path="@rlinf-77")),
        ("unix:///run/rlinf:1", Address("unix", path="/run/rlinf:1")),
        ("inproc://name", Address("inproc", path="name")),
        ("rdma://host:7", Address("rdma", "host", 7)),
    ],
)
def test_an_address_round_trips(text, address):
    assert Address.parse(text) == address
    assert str(address) == text
    assert Address.parse(address) is address


@pytest.mark.parametrize(
    "text",
    [
        *("", "tcp", "tcp:", "tcp://", "tcp://host", "tcp://host:", "tcp://:80", "tcp://host:port"),
        *("tcp://host:65536", "tcp://host:0", "tcp://::1:80", "tcp://[::1]", "tcp://[::1]80"),
        *("TCP://host:80", "tcp://a b:80", "tcp://[a]b:80", "tcp://user@host:80", "tcp://h:٣"),
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError):
        Address.parse(text)


@pytest.mark.parametrize(
    "parts",
    [
        {"host": "h"},
        {"host": "h", "port": 1, "path": "p"},
        {"path": "p", "port": 1},
        {"path": "looks:80"},
        {},
    ],
)
def test_parts_that_make_no_address_are_refused(parts):
    with pytest.raises(ValueError):
        Address("unix", **parts)


def test_a_device_round_trips():
    for text in ("cpu", "cuda:0", "npu:7"):
        assert str(Device.parse(text)) == text
    assert Device.parse("xpu") == Device("xpu", 0)
    for text in ("", "CUDA:0", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1"):
        with pytest.raises(ValueError, match="device"):
            Device.parse(text)


def record(host="h", pid=1, device="cpu", uuid=None, name="a/0"):
    parsed = Device.parse(device)
    return WorkerRecord(
        id=WorkerId.parse(name),
        epoch=1,
        addresses=(),
        host=host,
        pid=pid,
        device=Device(parsed.kind, parsed.index, uuid),
        metadata={},
    )


@pytest.mark.parametrize(
    ("a", "b", "near"),
    [
        (record(), record(), Locality.SAME_PROCESS),
        (record(device="cuda:0"), record(device="cuda:1"), Locality.SAME_PROCESS),
        (record(pid=1), record(pid=2), Locality.SAME_HOST),
        (record(pid=1, device="cuda:0"), record(pid=2, device="cuda:0"), Locality.SAME_DEVICE),
        (record(pid=1, device="cuda:0"), record(pid=2, device="npu:0"), Locality.SAME_HOST),
        (record(pid=1, device="cuda:0"), record(pid=2, device="cuda:1"), Locality.SAME_HOST),
        (
            record(pid=1, device="cuda:0", uuid="x"),
            record(pid=2, device="cuda:1", uuid="x"),
            Locality.SAME_DEVICE,
        ),
        (
            record(pid=1, device="cuda:0", uuid="x"),
            record(pid=2, device="cuda:0", uuid="y"),
            Locality.SAME_HOST,
        ),
        (record("h", 1, "cuda:0", "x"), record("i", 1, "cuda:0", "x"), Locality.REMOTE),
    ],
)
def test_locality_is_the_nearest_that_holds_and_symmetric(a, b, near):
    assert locality(a, b) is near
    assert locality(b, a) is near

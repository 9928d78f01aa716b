"""The decision table: every situation, overrides, and what is said about it."""

from types import SimpleNamespace as Fake

import pytest

from rlinf.comm.accelerator import local_device
from rlinf.comm.address import WorkerId
from rlinf.comm.device import Device
from rlinf.comm.errors import ConfigError, NoTransport
from rlinf.comm.registry import WorkerRecord
from rlinf.comm.selection import NAMES, TABLE, choose

SHIPPED = {"inproc", "shm", "tcp"}
COLLECTIVE = {"cuda": "nccl", "rocm": "rccl", "xpu": "xccl", "npu": "hccl", "musa": "mccl"}


def worker(name, host="a", pid=1, device="cpu"):
    return WorkerRecord(
        id=WorkerId.parse(name),
        epoch=1,
        addresses=(),
        host=host,
        pid=pid,
        device=Device.parse(device),
        metadata={},
    )


def pair(where, device="cpu", other=None):
    host, pid = {"process": ("a", 1), "host": ("a", 2), "remote": ("b", 1)}[where]
    return worker("x/0", device=device), worker("y/3", host, pid, other or device)


@pytest.mark.parametrize(
    ("where", "device", "other", "available", "transport"),
    [
        ("process", "cpu", None, SHIPPED, "inproc"),
        ("process", "cuda:0", "cuda:1", {*SHIPPED, "nccl"}, "inproc"),
        ("process", "cpu", None, {"tcp"}, "tcp"),
        ("host", "cpu", None, SHIPPED, "shm"),
        ("host", "cpu", None, {"tcp", "gloo"}, "tcp"),
        ("host", "cpu", None, {"gloo"}, "gloo"),
        ("host", "cpu", "cuda:0", {*SHIPPED, "nccl"}, "shm"),
        ("host", "cuda:0", "cuda:0", {*SHIPPED, "nccl", "cuda_ipc"}, "cuda_ipc"),
        ("host", "cuda:0", "cuda:0", {*SHIPPED, "nccl"}, "shm"),
        ("host", "cuda:0", "cuda:1", {*SHIPPED, "nccl", "cuda_ipc"}, "nccl"),
        ("host", "cuda:0", "cuda:1", {*SHIPPED, "cuda_ipc", "gloo"}, "cuda_ipc"),
        ("host", "cuda:0", "npu:1", {*SHIPPED, "nccl", "hccl"}, "shm"),
        ("host", "npu:0", "npu:0", {*SHIPPED, "hccl"}, "shm"),
        ("remote", "cpu", None, SHIPPED, "tcp"),
        ("remote", "cpu", None, {"gloo", "shm"}, "gloo"),
        ("remote", "cpu", "cuda:0", {*SHIPPED, "nccl"}, "tcp"),
        ("remote", "cuda:0", "cuda:0", {*SHIPPED, "nccl"}, "nccl"),
        ("remote", "cuda:0", "cuda:0", {"tcp", "cuda_ipc", "shm"}, "tcp"),
        ("remote", "cuda:0", "npu:0", {*SHIPPED, "nccl", "hccl"}, "tcp"),
    ],
)
def test_the_table(where, device, other, available, transport):
    choice = choose(*pair(where, device, other), available)
    assert choice.transport == transport
    assert choice.because.startswith(f"{transport}: ")


@pytest.mark.parametrize("kind", sorted(COLLECTIVE))
@pytest.mark.parametrize("where", ["host", "remote"])
def test_every_vendor_has_its_own_collectives(kind, where):
    everything = {*SHIPPED, *COLLECTIVE.values()}
    assert choose(*pair(where, f"{kind}:0", f"{kind}:1"), everything).transport == COLLECTIVE[kind]
    assert choose(*pair(where, f"{kind}:0", f"{kind}:1"), SHIPPED).transport in SHIPPED


def test_the_choice_is_symmetric():
    for where in ("process", "host", "remote"):
        for device in ("cpu", "cuda:0"):
            for other in ("cpu", "cuda:0", "cuda:1", "npu:0"):
                a, b = pair(where, device, other)
                assert choose(a, b, NAMES).transport == choose(b, a, NAMES).transport


def test_every_situation_has_a_row_and_ends_in_tcp_or_gloo():
    for row in TABLE:
        assert row.transports[-1] in ("tcp", "gloo")
    for where in ("process", "host", "remote"):
        for device in ("cpu", "fpga:0", "cuda:0"):
            assert choose(*pair(where, device), {"tcp"}).transport == "tcp"


def test_the_reason_is_a_sentence_and_says_what_was_missing():
    choice = choose(
        *pair("host", "cuda:0", "cuda:1"), {"tcp"}, (), {"nccl": "cupy is not installed"}
    )
    assert choice.because == (
        "tcp: both are on one host and use different cuda devices; better but missing: "
        "nccl (cupy is not installed), cuda_ipc (not available), shm (not available)"
    )


def test_priority_overrides_the_table_where_it_can_work():
    assert choose(*pair("host"), SHIPPED, ("tcp",)).transport == "tcp"
    assert "backend_priority" in choose(*pair("host"), SHIPPED, ("tcp",)).because
    # Shared memory does not reach another host, and gloo is not there.
    assert choose(*pair("remote"), SHIPPED, ("shm", "gloo")).transport == "tcp"
    assert "backend_priority" not in choose(*pair("remote"), SHIPPED, ("shm",)).because


def test_a_transport_from_elsewhere_is_taken_by_priority_only():
    assert choose(*pair("host"), {*SHIPPED, "warp"}).transport == "shm"
    assert choose(*pair("host"), {*SHIPPED, "warp"}, ("warp",)).transport == "warp"


def test_an_unknown_priority_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'shm'"):
        choose(*pair("host"), SHIPPED, ("shmem",))


def test_where_nothing_is_available_the_error_has_the_arithmetic():
    with pytest.raises(NoTransport) as caught:
        choose(*pair("remote"), {"shm"}, (), {"tcp": "y/3 listens on loopback only"})
    assert caught.value.peer == WorkerId("y", 3)
    for part in ("x/0", "y/3", "different hosts", "loopback only", "gloo", "are shm"):
        assert part in str(caught.value)
    with pytest.raises(NoTransport, match="none at all"):
        choose(*pair("remote"), ())


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "npu", "musa"])
def test_every_vendor_has_its_rows(kind):
    collective = COLLECTIVE[kind]
    available = {*SHIPPED, collective, "cuda_ipc"}
    same = choose(*pair("host", f"{kind}:0"), available)
    assert same.transport == ("cuda_ipc" if kind == "cuda" else "shm")
    assert choose(*pair("host", f"{kind}:0", f"{kind}:1"), available).transport == collective
    assert choose(*pair("remote", f"{kind}:0"), available).transport == collective
    assert choose(*pair("remote", f"{kind}:0", "cpu"), available).transport == "tcp"


def torch_with(kind, *, hip=None, index=1, uuid=None):
    properties = Fake(uuid=uuid) if uuid else Fake()
    return Fake(
        accelerator=Fake(
            is_available=lambda: kind is not None,
            current_accelerator=lambda: Fake(type=kind),
            current_device_index=lambda: index,
        ),
        version=Fake(hip=hip),
        **({kind: Fake(get_device_properties=lambda _: properties)} if kind else {}),
    )


@pytest.mark.parametrize(
    ("torch", "device"),
    [
        (torch_with(None), Device("cpu")),
        (torch_with("cuda", uuid="abc"), Device("cuda", 1, "abc")),
        (torch_with("cuda", hip="6.2"), Device("rocm", 1)),
        (torch_with("xpu", index=3), Device("xpu", 3)),
        (torch_with("npu"), Device("npu", 1)),
        (torch_with("musa"), Device("musa", 1)),
    ],
)
def test_the_local_device_by_the_names_of_torch(torch, device):
    assert local_device(torch=torch) == device


def test_what_is_missing_is_in_the_reason():
    available = {"shm", "tcp"}
    reasons = {"nccl": "neither cupy nor a torch with NCCL is installed", "cuda_ipc": "no cupy"}
    choice = choose(*pair("host", "cuda:0", "cuda:1"), available, (), reasons)
    assert choice.because == (
        "shm: both are on one host and use different cuda devices; better but missing: nccl "
        "(neither cupy nor a torch with NCCL is installed), cuda_ipc (no cupy)"
    )

"""Group operations between real processes, and what is said when a member is missing."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlinf.comm import (
    CommConfig,
    Endpoint,
    Group,
    MemoryRegistry,
    MessageMismatch,
    PeerLost,
    Timeout,
    UnknownWorker,
    WorkerId,
)
from rlinf.comm.group import relays
from rlinf.comm.testing import PeerProcess

NAMES = ("test/0", "peer/0", "peer/1", "peer/2")
PATIENT = CommConfig(connection_timeout_s=60.0)


@pytest.fixture
def me(registry):
    with Endpoint("test/0", registry=registry, config=PATIENT) as endpoint:
        yield endpoint


def peers(registry, program, *args):
    return [PeerProcess(n, registry, program, *args, config=PATIENT) for n in NAMES[1:]]


def end(processes):
    codes = [process.join() for process in processes]
    for process in processes:
        with process:
            pass
    return codes


def take_part(endpoint):
    group = Group(endpoint, NAMES)
    weights = group.broadcast(root="test/0")
    assert weights["w"].shape == (500, 500)
    assert (weights["w"] == 7).all()
    weights["w"] += 1  # it is this member's own
    assert group.broadcast({"rank": group.rank} if group.rank == 2 else None, root="peer/1") == {
        "rank": 2
    }
    mine = group.scatter(root="test/0")
    assert (mine == group.rank).all()
    assert group.gather(mine.sum(), root="test/0") is None
    everybody = group.all_gather_object({"rank": group.rank, "a": np.full(20_000, group.rank)})
    assert [one["rank"] for one in everybody] == [0, 1, 2, 3]
    assert all((one["a"] == one["rank"]).all() for one in everybody)
    group.barrier()
    Group(endpoint, NAMES[1:], name="without the first").barrier()


def test_all_operations_between_processes(registry, me):
    processes = peers(registry, take_part)
    group = Group(me, NAMES)
    weights = {"w": np.full((500, 500), 7.0)}
    assert group.broadcast(weights, root="test/0") is weights
    assert group.broadcast(root="peer/1") == {"rank": 2}
    group.scatter([np.full(30_000, rank) for rank in range(4)], root="test/0")
    assert (weights["w"] == 7).all()
    assert group.gather(-1, root="test/0") == [-1, 30_000, 60_000, 90_000]
    assert len(group.all_gather_object({"rank": 0, "a": np.zeros(20_000)})) == 4
    group.barrier()
    assert end(processes) == [0, 0, 0]


def die_at_the_third(endpoint):
    group = Group(endpoint, NAMES)
    group.barrier()
    group.all_gather_object(group.rank)
    if endpoint.id == WorkerId("peer", 1):
        endpoint.recv("test/0")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"barrier.*peer/1"):
        group.barrier()


def test_a_member_killed_in_the_middle_is_named_to_all(registry, me):
    processes = peers(registry, die_at_the_third)
    group = Group(me, NAMES)
    group.barrier()
    group.all_gather_object(0)
    me.send("now", "peer/1")
    with pytest.raises(PeerLost, match=r"barrier.*peer/1") as caught:
        group.barrier()
    assert caught.value.peer == WorkerId("peer", 1)
    assert end(processes) == [0, -signal.SIGKILL, 0]


def relay_and_die(endpoint):
    group = Group(endpoint, NAMES, host_of=far_apart)
    group.barrier()
    if endpoint.id == WorkerId("peer", 1):
        endpoint.recv("test/0")
        os.kill(os.getpid(), signal.SIGKILL)
    if endpoint.id == WorkerId("peer", 2):  # its copy was to come by way of peer/1
        with pytest.raises(PeerLost, match=r"broadcast.*peer/1"):
            group.broadcast(root="test/0")
    else:
        assert group.broadcast(root="test/0") == "hello"


def far_apart(record):
    return "near" if str(record.id) in ("test/0", "peer/0") else "far"


@pytest.mark.slow
def test_a_relay_killed_in_the_middle_is_named(registry, me):
    processes = peers(registry, relay_and_die)
    group = Group(me, NAMES, host_of=far_apart)
    group.barrier()
    me.send("now", "peer/1")
    with pytest.raises(PeerLost, match="peer/1"):
        me.recv("peer/1")
    with pytest.raises((PeerLost, Timeout), match=r"broadcast.*peer/1"):
        group.broadcast("hello", root="test/0", timeout=3.0)
    assert end(processes) == [0, -signal.SIGKILL, 0]


@pytest.fixture
def three():
    registry = MemoryRegistry()
    config = CommConfig(connection_timeout_s=30.0)
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
        Endpoint("c/0", registry=registry, config=config) as c,
    ):
        yield a, b, c


MEMBERS = ["a/0", "b/0", "c/0"]


def test_who_has_not_come_is_named(three):
    groups = [Group(one, MEMBERS) for one in three]
    groups[1].gather("b", root="a/0")
    with pytest.raises(Timeout, match=r"gather.*nothing from c/0 within 0.1 s") as caught:
        groups[0].gather("a", root="a/0", timeout=0.1)
    assert caught.value.peer == WorkerId("c", 0)
    with pytest.raises(Timeout, match=r"nothing from b/0, c/0"):
        Group(three[0], MEMBERS, name="second").barrier(timeout=0.05)


def test_the_first_tells_the_others_who_has_not_come_to_a_barrier(three):
    a, b, _ = (Group(one, MEMBERS) for one in three)
    b._endpoint.isend((1, "barrier", None), "a/0", tag=b._tag)
    with pytest.raises(Timeout, match="nothing from c/0"):
        a.barrier(timeout=0.05)
    turn = b._turn("barrier", 5.0)
    assert "nothing from c/0" in turn.hear([WorkerId("a", 0)])[WorkerId("a", 0)]["message"]


def test_an_unknown_member_is_named(three):
    group = Group(three[0], [*MEMBERS, "d/0"])
    with pytest.raises((Timeout, UnknownWorker), match="d/0"):
        group.broadcast("x", root="a/0", timeout=0.1)


def test_members_that_do_different_things_are_told(three):
    a, b, _ = (Group(one, MEMBERS[:2]) if i < 2 else None for i, one in enumerate(three))
    b.gather("b", root="a/0")
    with pytest.raises(MessageMismatch, match=r"barrier.*b/0 is at its operation 1, gather"):
        a.barrier()


def test_messages_of_users_do_not_mix_with_those_of_groups(three):
    a, b, _ = three
    b.send("plain", "a/0")
    Group(b, MEMBERS[:2]).gather("grouped", root="a/0")
    Group(b, MEMBERS[:2], name="other").gather("other", root="a/0")
    assert Group(a, MEMBERS[:2], name="other").gather(None, root="a/0") == [None, "other"]
    assert Group(a, MEMBERS[:2]).gather(None, root="a/0") == [None, "grouped"]
    assert a.recv("b/0") == "plain"


def test_wrong_uses(three):
    with pytest.raises(ValueError, match="a/0 is no member"):
        Group(three[0], ["b/0", "c/0"])
    with pytest.raises(ValueError, match="twice"):
        Group(three[0], ["a/0", "a/0"])
    with pytest.raises(ValueError, match="scatter needs 2 objects at its root, not 3"):
        Group(three[0], MEMBERS[:2]).scatter([1, 2, 3], root="a/0")
    with pytest.raises(ValueError, match="d/0 is no member"):
        Group(three[0], MEMBERS[:2]).broadcast(1, root="d/0")


def test_a_group_of_one(three):
    group = Group(three[0], ["a/0"])
    group.barrier()
    assert group.all_gather_object(1) == group.gather(1, root="a/0") == [1]
    assert group.broadcast(2, root="a/0") == group.scatter([2], root="a/0") == 2


def test_one_copy_a_host():
    members = [WorkerId("w", rank) for rank in range(7)]
    hosts = dict(zip(members, "xyxzyxy", strict=True))
    w = members
    assert relays(w[0], members, hosts) == {w[0]: (w[2], w[5], w[1], w[3]), w[1]: (w[4], w[6])}
    assert relays(w[4], members, hosts) == {
        w[4]: (w[1], w[6], w[0], w[3]),
        w[0]: (w[2], w[5]),
    }


def test_a_copy_for_another_host_is_sent_once(three):
    groups = [
        Group(one, MEMBERS, host_of=lambda record: str(record.id != WorkerId("a", 0)))
        for one in three
    ]
    before = three[0].statistics().sent_bytes
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(broadcast_a_megabyte, groups))
    assert [one.nbytes for one in got] == [1_000_000] * 3
    assert 1_000_000 < three[0].statistics().sent_bytes - before < 1_001_000
    assert 1_000_000 < three[1].statistics().sent_bytes < 1_001_000


def broadcast_a_megabyte(group):
    return group.broadcast(np.zeros(1_000_000, np.uint8), root="a/0")


def test_a_process_group_of_torch_for_named_workers(three):
    torch = pytest.importorskip("torch")
    groups = [Group(one, MEMBERS) for one in three]

    def add_up(group):
        processes = group.process_group(timeout=60.0)
        tensor = torch.full((1000,), float(group.rank + 1))
        processes.allreduce([tensor]).wait()
        group.barrier(timeout=60.0)  # nobody leaves while others are at it
        return tensor

    with ThreadPoolExecutor(3) as threads:
        for tensor in threads.map(add_up, groups):
            assert (tensor == 6).all()
    with pytest.raises(Timeout, match="nothing from b/0"):
        Group(three[0], MEMBERS[:2], name="alone").process_group(timeout=0.1)


def test_groups_may_be_made_and_used_in_opposite_orders(three):
    """Nobody waits for anybody to join: what a member has sent is there when another looks."""
    a, b, _ = three
    at_a = {name: Group(a, MEMBERS[:2], name=name) for name in "xyz"}
    at_b = {name: Group(b, MEMBERS[:2], name=name) for name in "zyx"}
    for name in "zyx":
        at_b[name].gather(name, root="a/0")
    for name in "xyz":
        assert at_a[name].gather(None, root="a/0") == [None, name]

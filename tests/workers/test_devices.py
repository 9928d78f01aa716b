"""Sharing devices among ranks: the arithmetic, and what is refused with which words."""

import pytest

from rlinf.sched import Placement
from rlinf.workers.devices import (
    Node,
    device_names,
    local_cores,
    node_of,
    rank_devices,
    strays,
)
from rlinf.workers.errors import InfeasiblePlacement


def place(*devices: str) -> Placement:
    return Placement("rollout", devices, chunk=None, shared=False, position=0)


def test_local_cores_are_counted_not_numbered() -> None:
    cores = local_cores()
    assert cores[0] == "core:0" and len(cores) == len(set(cores))


def test_a_single_node_needs_no_prefix() -> None:
    assert device_names([Node("a", (("core", 2), ("cuda", 1)))]) == ("core:0", "core:1", "cuda:0")


def test_nodes_without_devices_are_left_out() -> None:
    head, a, b = Node("head", (("core", 0),)), Node("a", (("core", 1),)), Node("b", (("core", 1),))
    assert device_names([head, a]) == ("core:0",)
    assert device_names([head, a, b]) == ("a/core:0", "b/core:0")
    assert node_of("a/core:0") == "a" and node_of("core:0") == ""


def test_ranks_get_equal_shares_in_order() -> None:
    cores = ("core:0", "core:1", "core:2", "core:3")
    assert rank_devices("r", 2, place(*cores), cores) == (cores[:2], cores[2:])
    assert rank_devices("r", 1, place(*cores), cores) == (cores,)
    assert rank_devices("r", 3, None, cores) == ((), (), ())
    assert rank_devices("r", 3, place(), cores) == ((), (), ())


def test_more_cores_than_there_are_is_infeasible_with_the_arithmetic() -> None:
    with pytest.raises(InfeasiblePlacement) as caught:
        rank_devices("rollout", 1, place("core:0", "core:1", "core:2"), ("core:0", "core:1"))
    assert "rollout needs core:2" in str(caught.value)
    assert "core: 3 asked for, 2 there" in str(caught.value)
    assert (caught.value.needed, caught.value.available) == (3, 2)


def test_a_worker_cannot_span_nodes() -> None:
    """Two cores on two nodes, and one worker that needs two: said at once, not waited for."""
    names = device_names([Node("a", (("core", 1),)), Node("b", (("core", 1),))])
    assert rank_devices("r", 2, place(*names), names) == (("a/core:0",), ("b/core:0",))
    with pytest.raises(InfeasiblePlacement, match="1 on a \\+ 1 on b: the most on one node is 1"):
        rank_devices("r", 1, place(*names), names)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_shares_must_come_out_even(count: int) -> None:
    cores = ("core:0", "core:1", "core:2")
    with pytest.raises(InfeasiblePlacement):
        rank_devices("r", count, place(*cores), cores)


def test_ranks_that_are_not_where_their_devices_are_get_told():
    shares = (("a/core:0",), ("b/core:0", "b/core:1"), ())
    assert strays(shares, ("a", "b", "c")) == ""
    assert strays((("core:0",),), ("anywhere",)) == ""
    said = strays(shares, ("a", "a", "c"))
    assert said.startswith("rank 1 is on a, its devices on b: a worker stays on its node")

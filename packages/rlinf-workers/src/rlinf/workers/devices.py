"""Devices of a cluster by name, and the arithmetic of sharing them among the ranks of a group.

A device is "core:0" or "cuda:0"; in a cluster of several nodes "node/core:0". The index of a core
counts the cores a process may run on, so it is valid inside a container or under taskset too.
Pure: nothing here asks the machine, except `local_cores`.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlinf.sched import Placement
from rlinf.workers.base import Place
from rlinf.workers.errors import InfeasiblePlacement

__all__ = [
    "Node",
    "check_local",
    "device_names",
    "for_each_group",
    "is_core",
    "local_cores",
    "node_of",
    "rank_devices",
    "rank_places",
    "strays",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that can run workers: its name and how many devices of each kind it has."""

    name: str
    devices: tuple[tuple[str, int], ...]


def is_core(device: str) -> bool:
    """Whether it is a processor core: core:0, node1/core:3; not cuda:0."""
    return device.rpartition("/")[2].startswith("core:")


def local_cores() -> tuple[str, ...]:
    """Names of the cores this process may run on."""
    return tuple(f"core:{index}" for index in range(len(os.sched_getaffinity(0))))


def device_names(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Names of all devices; nodes which have none (a head node with 0 CPUs) are left out."""
    able = [node for node in nodes if any(count > 0 for _, count in node.devices)]
    return tuple(
        f"{node.name}/{kind}:{index}" if len(able) > 1 else f"{kind}:{index}"
        for node in able
        for kind, count in node.devices
        for index in range(count)
    )


def node_of(device: str) -> str:
    """The name of the device's node; empty in a cluster of one node."""
    return device.rpartition("/")[0]


def for_each_group(devices: Sequence[str], workers: Iterable[int]) -> tuple[str, ...]:
    """Of these devices those that groups of so many workers can each have all of.

    All of them where every group has its share of workers on each node; else those of the node with
    the most, as a worker cannot span nodes.
    """
    nodes: dict[str, list[str]] = {}
    for device in devices:
        nodes.setdefault(node_of(device), []).append(device)
    alike = len({len(own) for own in nodes.values()}) == 1
    if alike and all(count % len(nodes) == 0 for count in workers):
        return tuple(devices)
    size = max(map(len, nodes.values()))
    return tuple(next(own for own in nodes.values() if len(own) == size))


def rank_devices(
    group: str, count: int, placement: Placement | None, available: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """The devices of each rank: equal shares of the placement's, in order.

    Raises:
        InfeasiblePlacement: A device is not there, the shares are not equal, or a rank's devices
            lie on more than one node, which no process can span.
    """
    if count < 1:
        raise InfeasiblePlacement(
            f"group {group}: count is {count}, it needs a worker at least",
            group=group,
            needed=1,
            available=count,
        )
    if placement is None or not placement.devices:
        return ((),) * count
    wanted = placement.devices
    _check_present(group, wanted, available)
    if len(wanted) % count:
        raise InfeasiblePlacement(
            f"group {group}: {len(wanted)} devices ({', '.join(wanted)}) cannot be shared equally "
            f"by {count} workers; use a count that divides {len(wanted)}",
            group=group, needed=count, available=len(wanted),
        )  # fmt: skip
    size = len(wanted) // count
    shares = tuple(wanted[rank * size : (rank + 1) * size] for rank in range(count))
    for rank, share in enumerate(shares):
        _check_one_node(f"{group}/{rank}", share)
    return shares


def rank_places(
    group: str, count: int, placement: Placement, available: Sequence[str], batch: int | None = None
) -> list[Place]:
    """Where each rank computes; see `rank_devices`.

    Args:
        batch: Items of an iteration; several ranks that take a whole one take equal parts of it.
    """
    chunk = placement.chunk
    if chunk is None and batch is not None and count > 1:
        chunk = -(-batch // count)
    shares = rank_devices(group, count, placement, available)
    return [Place(placement, share, chunk, eager=False) for share in shares]


def strays(shares: Sequence[Sequence[str]], nodes: Sequence[str]) -> str:
    """What to say of ranks whose devices are on another node than they are; empty: of none.

    Args:
        shares: The devices of each rank.
        nodes: Where each rank is.
    """
    wanted = [node_of(share[0]) if share else "" for share in shares]
    apart = [
        f"rank {rank} is on {node}, its devices on {want}"
        for rank, (want, node) in enumerate(zip(wanted, nodes, strict=True))
        if want not in ("", node)
    ]
    if not apart:
        return ""
    return (
        f"{'; '.join(apart)}: a worker stays on its node, so the plan counts for turns, chunks and "
        "the numbers of cores only; launch the group with its placement to have it there"
    )


def check_local(devices: Iterable[str], cores: Sequence[str]) -> None:
    """Refuse cores that this machine does not have.

    Raises:
        InfeasiblePlacement: With the arithmetic.
    """
    wanted = [device for device in devices if device.startswith("core:")]
    if any(device not in cores for device in wanted):
        raise InfeasiblePlacement(
            f"devices names {len(wanted)} cores ({', '.join(wanted)}), but this process may use "
            f"{len(cores)} ({', '.join(cores)}); name those, or leave devices out",
            needed=len(wanted), available=len(cores),
        )  # fmt: skip


def _check_present(group: str, wanted: Sequence[str], available: Sequence[str]) -> None:
    missing = [device for device in wanted if device not in available]
    if not missing:
        return
    has = Counter(device.partition(":")[0] for device in available)
    needs = Counter(device.partition(":")[0] for device in wanted)
    sums = "; ".join(f"{kind}: {n} asked for, {has[kind]} there" for kind, n in needs.items())
    raise InfeasiblePlacement(
        f"group {group} needs {', '.join(missing)}, which the cluster does not have ({sums}; the "
        f"cluster has {', '.join(available) or 'no devices'}); plan for the devices there are",
        group=group, needed=len(wanted), available=len(wanted) - len(missing),
    )  # fmt: skip


def _check_one_node(worker: str, share: Sequence[str]) -> None:
    nodes = Counter(node_of(device) for device in share)
    if len(nodes) > 1:
        parts = " + ".join(f"{n} on {node or 'the head'}" for node, n in nodes.items())
        raise InfeasiblePlacement(
            f"worker {worker} needs {len(share)} devices on one node, but its share is {parts}: "
            f"the most on one node is {max(nodes.values())}; use more, smaller workers",
            group=worker.rpartition("/")[0], needed=len(share), available=max(nodes.values()),
        )  # fmt: skip

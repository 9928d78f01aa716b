"""Groups that grow and shrink while the program runs."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rlinf.sched import Placement
from rlinf.workers import Cluster, ConfigError, InfeasiblePlacement, Worker, WorkerError, stage
from rlinf.workers.devices import local_cores
from rlinf.workers.testing import Learner, shared_ray


class Counter(Worker):
    """Counts from what its leader says."""

    def __init__(self, base: int) -> None:
        self.base, self.told = base, 0

    def recovered(self) -> None:
        self.told = 7

    def about(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.base, self.told

    def where(self) -> tuple[int, tuple[str, ...]]:
        return os.getpid(), self.context.devices

    @stage
    def add(self, items: list[int]) -> list[tuple[int, int]]:
        return [(item + self.base, self.rank) for item in items]

    def die(self) -> None:
        if self.context.incarnation == 0:
            os._exit(1)


class Gated(Worker):
    """Works on an item for as long as the test wants."""

    gate = threading.Event()
    begun = threading.Semaphore(0)

    @stage
    def work(self, items: list[int]) -> list[int]:
        self.begun.release()
        assert self.gate.wait(60)
        return items


@pytest.fixture(scope="module", params=["inline", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "ray":
        shared_ray()
    with Cluster(launcher=request.param) as running:
        yield running


@pytest.fixture
def group(cluster: Cluster, request: pytest.FixtureRequest) -> Any:
    started = Counter.group(cluster, 100, name=request.node.name.split("[")[0]).launch()
    yield started
    started.resize(1).result(60)


def added(cluster: Cluster, group: Any, step: int, count: int = 40) -> list[tuple[int, int]]:
    given, taken = cluster.channels(step, f"{group.name}-given", f"{group.name}-taken")
    given.put_many(list(range(count)))
    given.close()
    group.add(given, taken).result(60)
    return sorted(taken.get(timeout=30) for _ in range(count))


def test_a_group_grows_and_shrinks(cluster: Cluster, group: Any) -> None:
    assert group.about().result(60) == [(0, 1, 100, 0)]
    group.resize(3).result(60)
    assert len(group) == 3
    assert group.about().result(60) == [(0, 3, 100, 0), (1, 3, 100, 7), (2, 3, 100, 7)]
    assert [item for item, _ in added(cluster, group, 1)] == list(range(100, 140))
    [first, *others] = [pid for pid, _ in group.where().result(60)]
    group.resize(1).result(60)
    assert group.about().result(60) == [(0, 1, 100, 0)]
    assert {rank for _, rank in added(cluster, group, 2)} == {0}
    leaving = [psutil.Process(pid) for pid in others if pid != first and psutil.pid_exists(pid)]
    assert psutil.wait_procs(leaving, timeout=20)[1] == []


def test_one_that_joined_and_died_joins_again(cluster: Cluster, group: Any) -> None:
    group.resize(2).result(60)
    if group.where().result(60)[1][0] == os.getpid():
        pytest.skip("a thread cannot be killed")
    group[1].die().result(60)
    assert group.about().result(60) == [(0, 2, 100, 0), (1, 2, 100, 7)]


def test_who_has_left_cannot_be_called(cluster: Cluster, group: Any) -> None:
    group.resize(2).result(60)
    second = group[1]
    group.resize(1).result(60)
    with pytest.raises(WorkerError, match="has left its group"):
        second.about().result(30)


def test_a_worker_finishes_its_stage_before_it_leaves() -> None:
    with Cluster(launcher="inline") as cluster:
        group: Any = Gated.group(cluster, count=2).launch()
        given, taken = cluster.channels(1, "given", "taken")
        given.put_many(list(range(16)))
        given.close()
        working = group.work(given, taken)
        assert Gated.begun.acquire(timeout=30) and Gated.begun.acquire(timeout=30)
        shrinking = group.resize(1)
        assert not shrinking.done()
        Gated.gate.set()
        working.result(60)
        shrinking.result(60)
        assert sorted(taken.get(timeout=30) for _ in range(16)) == list(range(16))


def test_sizes_that_cannot_be() -> None:
    first = local_cores()[:1]
    with Cluster(launcher="inline") as cluster:
        placed = Counter.group(cluster, 1).launch(Placement("counter", first, None, False, 0))
        with pytest.raises(InfeasiblePlacement):
            placed.resize(2)
        assert placed.about().result(30) == [(0, 1, 1, 0)]
        with pytest.raises(ConfigError, match="at least one stays"):
            placed.resize(0)
        with pytest.raises(ConfigError, match="is a part of one"):
            placed[0].resize(2)
        learner = Learner.group(cluster).launch()
        with pytest.raises(ConfigError, match="holds state: its size is fixed"):
            learner.resize(2)

"""Calls on groups: order, results, errors, arguments."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlinf.channel import Channel, ChannelRef
from rlinf.channel.monitor import Observer, find_job, first
from rlinf.comm import Timeout
from rlinf.workers import (
    CallError,
    Cluster,
    ClusterClosed,
    ConfigError,
    MethodUnknown,
    StartError,
    Worker,
    wait_all,
)
from rlinf.workers.devices import local_cores
from rlinf.workers.testing import shared_ray


class Counter(Worker):
    def __init__(self, start: int = 0) -> None:
        self.count = start + 100 * self.rank
        self.known = (str(self.id), self.world_size, self.context.incarnation)

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    def who(self) -> tuple[str, int, int]:
        return self.known

    def norm(self, values: np.ndarray) -> float:
        return float(np.linalg.norm(values))

    def name_of(self, channel: ChannelRef) -> str:
        assert isinstance(channel, ChannelRef)
        return channel.name

    def divide(self, by: int) -> float:
        return 1 / by

    def unsendable(self) -> Any:
        return (item for item in [lambda: 0])

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)  # an answer that is not there yet

    def cores(self) -> int:
        return self.context.place.threads


class Picky(Worker):
    def __init__(self, model: str) -> None:
        raise FileNotFoundError(f"no model at {model}")


@pytest.fixture(scope="module", params=["inline", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "ray":
        shared_ray()
    with Cluster(launcher=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def counters(cluster: Cluster) -> Any:
    return Counter.group(cluster, 7, count=2).launch()


def test_a_call_runs_on_every_rank_in_order(counters: Any) -> None:
    handles = [counters.add(amount) for amount in (1, 1, 1)]
    assert wait_all(handles, timeout=60) == [[8, 108], [9, 109], [10, 110]]
    assert counters.ids == ("counter/0", "counter/1")
    assert counters.who().result(30) == [("counter/0", 2, 0), ("counter/1", 2, 0)]


def test_one_rank_can_be_called(counters: Any) -> None:
    assert counters[1].who().result(30) == [("counter/1", 2, 0)]


def test_arguments_travel(cluster: Cluster, counters: Any) -> None:
    values = np.arange(100_000.0)
    assert counters.norm(values).result(30) == [pytest.approx(np.linalg.norm(values))] * 2
    channel = cluster.channel("argument")
    assert isinstance(channel, Channel)
    assert counters.name_of(channel).result(30) == ["argument", "argument"]


def test_a_job_can_be_looked_at_from_outside(cluster: Cluster, counters: Any) -> None:
    counters.who().result(60)  # they have started
    channel = cluster.channel("seen")
    channel.put_many([b"a", b"b"])
    channel.flush()
    with Observer(find_job(str(os.getpid()))) as observer:
        seen = first(observer)
    assert ("seen", 2) in [(one.name, one.depth) for one in seen.server.channels]
    names = {peer.id for peer in seen.peers}
    assert names >= {"channel/0", "controller/0", "counter/0", "counter/1"}


def test_an_error_names_the_worker_and_the_line(counters: Any) -> None:
    with pytest.raises(CallError) as caught:
        counters.divide(0).result(30)
    error = caught.value
    assert error.worker in counters.ids
    assert (error.method, error.kind) == ("divide", "ZeroDivisionError")
    assert f"{error.worker}.divide raised ZeroDivisionError: division by zero" in str(error)
    assert "return 1 / by" in (error.traceback or "")
    assert "process.py" not in (error.traceback or ""), "our own frames are of no use to anybody"
    assert any("return 1 / by" in note for note in error.__notes__)
    assert counters.divide(2).result(30) == [0.5, 0.5], "the worker goes on"


def test_an_unknown_method_names_the_nearest(counters: Any) -> None:
    with pytest.raises(MethodUnknown, match="no public method 'ad'; did you mean 'add'"):
        counters.ad(1)
    assert not hasattr(counters, "recovered")


def test_a_constructor_that_raises_is_reported() -> None:
    with Cluster(launcher="inline") as cluster:
        group = Picky.group(cluster, "/nowhere").launch()
        words = "picky/0: constructing Picky raised FileNotFoundError: no model at /nowhere"
        with pytest.raises(StartError, match=words):
            group.wait_ready(30)
        with pytest.raises(StartError, match=words):
            group.resident_bytes().result(30)


def test_a_name_is_used_once(cluster: Cluster, counters: Any) -> None:
    with pytest.raises(ConfigError, match="has a group 'counter' already"):
        Counter.group(cluster).launch()


def test_a_wait_may_have_a_deadline() -> None:
    with Cluster(launcher="inline") as cluster:
        source = cluster.channel("never")
        from rlinf.workers.testing import Scorer

        group = Scorer.group(cluster).launch()
        waiting = group.score(source)
        with pytest.raises(Timeout):
            wait_all([waiting], timeout=0.2)
    with pytest.raises(ClusterClosed, match=r"scorer/0.score: the cluster was closed"):
        waiting.result(0)


def test_who_waits_for_a_call_takes_in_its_answer(cluster: Cluster, counters: Any) -> None:
    counters.wait_ready(60)
    me = threading.current_thread()
    takers: list[threading.Thread] = []
    for _ in range(20):
        handle = counters.rest(0.05)
        handle.add_done_callback(lambda _: takers.append(threading.current_thread()))
        handle.result(60)
    assert takers.count(me) > 10


def test_a_call_of_a_cluster_that_was_closed_fails() -> None:
    with Cluster(launcher="inline") as cluster:
        counters = Counter.group(cluster, name="late").launch()
        counters.wait_ready(60)
    with pytest.raises(ClusterClosed, match="late"):
        counters.rest(0.0).result(60)


def test_threads_follow_the_cores() -> None:
    from rlinf.sched import Placement

    with Cluster(launcher="inline") as cluster:
        everything = Placement("all", cluster.devices, None, shared=False, position=0)
        all_cores = Counter.group(cluster, name="all").launch(everything)
        none = Counter.group(cluster, name="none").launch()
        assert all_cores.cores().result(30) == [len(local_cores())]
        assert none.cores().result(30) == [1]

"""The cluster as a whole: what it refuses, what it leaves behind."""

import socket
import threading

import pytest

from rlinf.channel import ServerLost
from rlinf.comm import PeerLost
from rlinf.sched import Placement
from rlinf.workers import (
    CallError,
    Cluster,
    ClusterClosed,
    ClusterConfig,
    ConfigError,
    InfeasiblePlacement,
    StageError,
    StartError,
    WorkerDied,
    explain,
)
from rlinf.workers.devices import local_cores
from rlinf.workers.errors import Aborted, is_consequence
from rlinf.workers.testing import Scorer, launch, placements, run_step


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(ConfigError, match="launcher=slurm is not known"):
        Cluster(launcher="slurm")


@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_cores_that_are_not_there_are_refused_at_once(launcher: str) -> None:
    have = len(local_cores())
    devices = tuple(f"core:{index}" for index in range(have + 1))
    with pytest.raises(InfeasiblePlacement, match=f"names {have + 1} cores .* may use {have}"):
        Cluster(launcher=launcher, devices=devices)


def test_a_placement_that_does_not_fit_is_refused_at_launch() -> None:
    with Cluster(launcher="inline", devices=("core:0",)) as cluster:
        big = Placement("scorer", ("core:0", "core:1"), None, shared=False, position=0)
        with pytest.raises(InfeasiblePlacement, match="core: 2 asked for, 1 there"):
            Scorer.group(cluster).launch(big)


def test_a_ray_cluster_that_is_not_there_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StartError, match=rf"cannot join Ray at 127.0.0.1:{port}: nobody answers"):
        Cluster(ClusterConfig(ray_address=f"127.0.0.1:{port}"), "ray")


def test_heartbeats_must_fit_into_the_silence() -> None:
    with pytest.raises(ConfigError, match="two heartbeats"):
        ClusterConfig(silence_s=1.0, heartbeat_s=1.0)


def threads() -> set[threading.Thread]:
    """All but those which renew leases: they sleep until the next renewal, and then end."""
    return {t for t in threading.enumerate() if not t.name.startswith("rlinf-leases")}


def test_nothing_is_left_in_this_process() -> None:
    before = threads()
    for _ in range(2):
        with Cluster(launcher="inline") as cluster:
            groups = launch(cluster, placements("temporal", cluster.devices, 12))
            run_step(cluster, groups, 1)
        cluster.close()
    assert threads() <= before
    with pytest.raises(ClusterClosed):
        groups[0].load().result(1)


def test_an_error_inside_the_context_goes_through_and_closes() -> None:
    with pytest.raises(KeyError), Cluster(launcher="inline") as cluster:
        Scorer.group(cluster).launch()
        raise KeyError("mine")
    assert not [t for t in threading.enumerate() if t.name.startswith(("scorer", "channel"))]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ServerLost("c", "channel/0", "get"), True),
        (PeerLost("gone"), True),
        (Aborted("given up"), True),
        (StageError("raised", kind="ServerLost"), True),
        (CallError("raised", kind="PeerLost"), True),
        (CallError("raised", kind="WeightsUnknown"), True),
        (StageError("raised", kind="ValueError"), False),
        (WorkerDied("it died"), False),
        (KeyError("x"), False),
    ],
)
def test_what_may_come_from_another_ones_death(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected


def test_the_screen_gets_the_first_cause_in_one_paragraph() -> None:
    died = WorkerDied("worker trainer/0 died:\n  killed", worker="trainer/0")
    assert explain(died) == "worker trainer/0 died: killed"
    failed = StageError("reward/0.score raised ValueError: bad")
    assert explain(Aborted("given up", because=str(failed))) == str(failed)
    assert explain(ZeroDivisionError("no")) == "ZeroDivisionError: no"

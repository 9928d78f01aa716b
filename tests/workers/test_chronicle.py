"""What a job tells from outside: its workers, what they did, and what happened to them."""

from pathlib import Path

import pytest

from rlinf.channel import running_jobs
from rlinf.channel.observer import Observer, first
from rlinf.channel.snapshot import Snapshot
from rlinf.comm.testing import eventually
from rlinf.workers import Cluster, ClusterConfig
from rlinf.workers.chronicle import MOST_SPANS, MOST_TOLD, Chronicle
from rlinf.workers.records import ChunkRecord
from rlinf.workers.testing import Fault, launch, placements, prompts, run_step, shared_ray

WAIT_S = 60.0
CONFIG = ClusterConfig(silence_s=6.0, heartbeat_s=0.2)
PARTS = {"stage", "wait for devices"}


def record(**changes: object) -> ChunkRecord:
    numbers = dict.fromkeys(ChunkRecord.__dataclass_fields__, 0)
    named = {"worker": "w/0", "stage": "work", "input": "", "output": "", "emitted": ()}
    return ChunkRecord(**(numbers | named | changes))  # type: ignore[arg-type]


def test_the_parts_of_a_record_lie_around_its_work() -> None:
    one = record(start=10.0, end=12.0, seconds=2.0, onload_s=0.5, waited_s=1.0, offload_s=0.25)
    assert list(one.parts()) == [
        ("stage", 10.0, 2.0),
        ("onload", 9.5, 0.5),
        ("wait for items", 8.5, 1.0),
        ("offload", 12.0, 0.25),
    ]


def test_the_last_ones_are_kept_and_told_once() -> None:
    chronicle = Chronicle()
    for step in range(MOST_SPANS + 100):
        chronicle(record(iteration=step, seconds=1.0))
    chronicle.note("plan", "", "as it was")
    spans, [incident] = chronicle.since(0, 0)
    assert [span.number for span in spans] == list(range(MOST_SPANS + 101))[-MOST_TOLD:]
    assert incident.text == "as it was"
    assert chronicle.since(spans[-1].number, incident.number) == ((), ())


@pytest.mark.parametrize("launcher", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_running_job_is_seen_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    if launcher == "ray":
        shared_ray()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    kind = "exit" if launcher == "inline" else "kill"
    faults = {"sampler": Fault(kind, prompts(2, 12)[5])}
    with Cluster(CONFIG, launcher, folder=tmp_path / "run") as cluster:
        groups = launch(cluster, placements("temporal", cluster.devices, 12), faults)
        run_step(cluster, groups, 1)
        [job] = running_jobs()
        with Observer(job) as observer:
            first(observer)

            def seen() -> Snapshot:
                snapshot = observer.look(WAIT_S)
                assert snapshot is not None
                return snapshot

            eventually(lambda: bool((life := seen().life) and life.spans), WAIT_S)
            run_step(cluster, groups, 2)
            cluster.note("plan", "as it was")
            eventually(lambda: any(one.kind == "plan" for one in seen().log), WAIT_S)
            eventually(lambda: all(one.rss_bytes for one in seen().life.workers), WAIT_S)  # type: ignore[union-attr]
            last = seen()
            assert len(observer.connections().connections) > 3
    assert last.life is not None and last.life.run == str(tmp_path / "run")
    assert {span.iteration for span in last.life.spans} == {1, 2}
    assert {span.kind for span in last.life.spans} >= PARTS
    assert len({span.number for span in last.life.spans}) == len(last.life.spans)
    workers = {one.id: one for one in last.life.workers}
    assert {"channel/0", "sampler/0", "scorer/0", "learner/0"} <= workers.keys()
    assert workers["sampler/0"].restarts == 1 and workers["sampler/0"].devices
    assert workers["learner/0"].cpu_s > 0
    died = [one for one in last.log if one.kind == "died"]
    assert [one.who for one in died] == ["sampler/0"] and "started again" in died[0].text

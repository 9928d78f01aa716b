"""A job under `rlinf-profiler --trace` says where its time went."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.sched import Workflow, load_trace
from rlinf.sched.cli import profiler_main
from rlinf.sched.config import traced_environment
from rlinf.sched.report import report
from rlinf.sched.trace import totals
from rlinf.sched.traffic import traffic
from rlinf.workers import Cluster
from rlinf.workers.testing import launch, placements, run_step

PROGRAM = """
from rlinf.workers import Cluster
from rlinf.workers.testing import launch, placements, run_step
with Cluster(launcher="LAUNCHER") as cluster:
    groups = launch(cluster, placements("temporal", cluster.devices, 12))
    for step in (1, 2):
        run_step(cluster, groups, step)
"""


@pytest.mark.parametrize("launcher", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.timeout(120)
def test_a_job_is_traced(tmp_path: Path, launcher: str) -> None:
    profiler = "import sys; from rlinf.sched.cli import profiler_main as m; sys.exit(m())"
    program = [sys.executable, "-c", PROGRAM.replace("LAUNCHER", launcher)]
    options = ["--trace", "all", "--output", "trace", "--"]
    done = subprocess.run(
        [sys.executable, "-c", profiler, *options, *program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "stage: sampler.sample" in done.stdout
    for part in ("for items", "over", "what would help", "sampler.sample twice as fast"):
        assert part in done.stdout, part
    workflow = str(tmp_path / "workflow.yaml")
    assert profiler_main(["report", str(tmp_path / "trace"), "--workflow", workflow]) == 0
    components = list(Workflow.load(workflow).profile.components)
    assert components[:2] == ["sampler.sample", "scorer.score"]
    spans = load_trace(tmp_path / "trace")
    counts = {(t.kind, t.name): t.count for t in totals(spans)}
    assert counts["stage", "sampler.sample"] == 2
    assert {one.transport for one in traffic(spans)} <= {"inproc", "shm", "tcp", ""}
    assert any(one.transport for one in traffic(spans)), report(spans)
    processes = {span.where.partition("/")[0] for span in spans if span.kind == "comm"}
    assert {"controller", "sampler", "channel"} <= processes, report(spans)
    assert sum(span.nbytes for span in spans) > 0
    assert max(s.start + s.seconds for s in spans) - min(s.start for s in spans) < 110


@pytest.mark.parametrize(("kind", "told"), [("flow", "stage"), ("worker_communication", "comm")])
def test_only_what_is_asked_for_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str
) -> None:
    for name, value in traced_environment(tmp_path, (kind,)).items():
        monkeypatch.setenv(name, value)
    with Cluster(launcher="inline") as cluster:
        run_step(cluster, launch(cluster, placements("temporal", cluster.devices, 12)), 1)
    kinds = {span.kind for span in load_trace(tmp_path)}
    assert told in kinds and len(kinds & {"stage", "comm"}) == 1

"""A job under `rlinf-profiler --trace` says where its time went."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.sched import load_trace
from rlinf.sched.trace import report, totals

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
    options = ["--trace", "worker_communication", "--output", "trace", "--"]
    done = subprocess.run(
        [sys.executable, "-c", profiler, *options, *program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "stage: sampler.sample" in done.stdout
    spans = load_trace(tmp_path / "trace")
    counts = {(t.kind, t.name): t.count for t in totals(spans)}
    assert counts["stage", "sampler.sample"] == 2
    processes = {span.where.partition("/")[0] for span in spans if span.kind == "comm"}
    assert {"controller", "sampler", "channel"} <= processes, report(spans)
    assert sum(span.nbytes for span in spans) > 0
    assert max(s.start + s.seconds for s in spans) - min(s.start for s in spans) < 110

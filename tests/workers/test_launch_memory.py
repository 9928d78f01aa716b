"""What a launched process does with memory, and which of Ray's own processes stay."""

import subprocess
import sys

import psutil

from rlinf.workers import Cluster
from rlinf.workers.testing import Scorer

FAULTS = """
import resource, sys
import torch
from rlinf.workers.launch.config import keep_freed_memory

if sys.argv[1:]:
    keep_freed_memory()


def batch():
    return [torch.ones(1 << 20) for _ in range(8)]


batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    command = [sys.executable, "-c", FAULTS, *arguments]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


def test_memory_that_was_freed_is_not_asked_for_again() -> None:
    assert 4 * faults("keep") < faults()


def test_a_cluster_of_its_own_has_no_monitors() -> None:
    with Cluster(launcher="ray") as cluster:
        Scorer.group(cluster).launch().wait_ready(60)
        there = " ".join(
            " ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)
        )
    assert "raylet" in there
    assert not [
        name for name in ("monitor.py", "log_monitor.py", "dashboard.py") if f"/{name}" in there
    ]

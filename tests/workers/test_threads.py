"""Threads that computed end with the computation."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rlinf.workers.launch.threads import end_threads

LARGE = 1 << 20
"""Elements that torch adds with several threads."""
AT_ONCE = """
import importlib, sys
from rlinf.workers import Cluster, Worker

class Heavy(Worker):
    def __init__(self):
        importlib.import_module("torch")

class Light(Worker):
    pass

with Cluster(launcher="inline") as cluster:
    first = Heavy.group(cluster).launch()
    while "torch" not in sys.modules:
        pass
    assert not hasattr(sys.modules["torch"], "set_num_threads"), "it was too quick"
    Light.group(cluster).launch().wait_ready(60)
    first.wait_ready(60)
"""


def test_a_computation_leaves_no_threads_behind() -> None:
    counts: list[int] = []

    def compute() -> None:
        torch.set_num_threads(4)
        before = _threads()
        values = torch.ones(LARGE)
        for _ in range(2):
            values += 1
            counts.append(_threads() - before)
            end_threads()
            counts.append(_threads() - before)

    apart = threading.Thread(target=compute)  # its setting is its own, and ends with it
    apart.start()
    apart.join(60)
    if not counts or counts[0] == 0:
        pytest.skip("torch computes with threads that are not OpenMP's here")
    assert counts == [3, 0, 3, 0]


def test_ending_them_again_does_nothing() -> None:
    end_threads()
    end_threads()
    assert torch.ones(LARGE).sum() == LARGE


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_worker_starts_while_another_imports_torch() -> None:
    """On threads of one process they find a module that is not complete yet."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

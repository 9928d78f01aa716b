"""A program that ends, however it ends, leaves nothing: no process, socket, memory or folder."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlinf.workers.testing import files_left

PROGRAM = """
import sys, time
from rlinf.workers import Cluster, explain, WorkerError
from rlinf.workers.testing import Fault, launch, prompts, run_step

def main():
    fault = {"learner": Fault("kill", prompts(3, 12)[5])} if sys.argv[2] == "die" else {}
    with Cluster(launcher=sys.argv[1]) as cluster:
        groups = launch(cluster, {}, fault)
        for step in range(1, 1_000_000):
            run_step(cluster, groups, step)
            if step == 2:
                print("ready", flush=True)
            if sys.argv[2] == "end" and step == 3:
                break
    print("ended", flush=True)

try:
    main()
except KeyboardInterrupt:
    sys.exit(130)
except WorkerError as error:
    print("error:", explain(error), file=sys.stderr)
    sys.exit(1)
"""
ENDS = {
    "end": (None, 0),
    "interrupt": (signal.SIGINT, 130),
    "terminate": (signal.SIGTERM, 143),
    "kill": (signal.SIGKILL, -9),
    "die": (None, 1),
}


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short name: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def alive(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()) or process.name())
        except psutil.NoSuchProcess:
            continue
    return found


BUSY = """
import sys
import torch
from rlinf.workers import Cluster, Worker

class Busy(Worker):
    def compute(self):
        layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
        while True:
            layers(torch.ones(64, 64)).sum().backward()

    def ready(self):
        pass

with Cluster(launcher="inline") as cluster:
    group = Busy.group(cluster).launch()
    group.ready().result(60)
    group.compute()
    sys.exit(130)
"""


def test_a_thread_that_computes_does_not_bring_the_end_of_the_process_down() -> None:
    """It would be in C++ while the interpreter is torn down, as at Ctrl-C in a warm-up."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_nothing_is_left(temporary: Path, launcher: str, end: str) -> None:
    if (launcher, end) == ("inline", "die"):
        pytest.skip("the thread of a worker cannot be killed")
    before = shared_memory()
    number, code = ENDS[end]
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, launcher, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first == "ready\n", first + child.communicate(timeout=60)[1]
        processes = family(psutil.Process(child.pid))
        if number == signal.SIGINT:
            os.killpg(child.pid, number)  # as a terminal does: to everybody in the foreground
        elif number is not None:
            child.send_signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    assert child.returncode == code, err
    assert out == ("ended\n" if end == "end" else "")
    check_screen(end, err)
    deadline = time.monotonic() + 20
    left: object = True
    while left and time.monotonic() < deadline:
        psutil.wait_procs(processes, timeout=0.2)
        left = alive(processes) or files_left(temporary) or shared_memory() - before
    assert alive(processes) == []
    assert files_left(temporary) == []
    assert shared_memory() <= before


def check_screen(end: str, err: str) -> None:
    if end == "die":
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: worker learner/0 (process ") and "died: " in last
        assert "Traceback" not in err
    else:
        assert err == ""

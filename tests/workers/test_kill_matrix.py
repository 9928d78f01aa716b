"""Whoever fails, however, whenever: how the job ends. Real processes, struck by events.

`EXPECTED` is the table of docs/guarantees.md as data; a cell is one victim, one kind of failure and
one moment of its second step. A cell that does not end within BOUND_S has failed.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlinf.workers import Cluster, ClusterConfig, WorkerDied, WorkerError
from rlinf.workers.checkpoint import CheckpointConfig, Checkpoints
from rlinf.workers.testing import (
    Fault,
    files_left,
    launch,
    placements,
    prompts,
    run_steps,
    serve_strikes,
    shared_ray,
)

BOUND_S = 60
STEPS = 4
CONFIG = ClusterConfig(silence_s=6.0, heartbeat_s=0.5)
WORKERS = ("sampler/0", "scorer/0", "learner/0")
SERVERS = ("channel/0", "controller")
KINDS = ("kill", "stop", "raise", "exit")
MOMENTS = ("idle", "busy", "sync", "onload")

RECOVERS = "the run ends as an undisturbed one: the same outcomes, each sample learnt from once"
FAILS = "the job ends with the error that was raised: it is the program's"
STOPS = "the job ends and names the channel server"
ENDS = "the program ends with the exit code of its signal, and leaves nothing"
IGNORES = "nothing happens: the server runs none of the program's code, and SIGINT is not for it"
GOES_ON = "nothing happens until SIGCONT, then the run ends as an undisturbed one"
EXPECTED = {
    **{(victim, kind): RECOVERS for victim in WORKERS for kind in ("kill", "stop", "exit")},
    **{(victim, "raise"): FAILS for victim in WORKERS},
    **{("channel/0", kind): STOPS for kind in ("kill", "stop", "exit")},
    ("channel/0", "raise"): IGNORES,
    **{("controller", kind): ENDS for kind in ("kill", "raise", "exit")},
    ("controller", "stop"): GOES_ON,
}
NOT_THERE = {
    ("scorer/0", "raise", "sync"): "it takes no part in the sync: there is no code to raise",
    ("scorer/0", "exit", "sync"): "it takes no part in the sync: there is no code to exit from",
}
QUICK = {
    ("sampler/0", "kill", "sync"),
    ("learner/0", "kill", "busy"),
    ("learner/0", "exit", "onload"),
    ("channel/0", "kill", "busy"),
}
"""In the default suite; the others are slow."""
CODES = {"kill": -signal.SIGKILL, "raise": 130, "exit": 128 + signal.SIGTERM}


@dataclass(frozen=True)
class Cell:
    victim: str
    kind: str
    moment: str

    def __str__(self) -> str:
        return "-".join((self.victim.removesuffix("/0"), self.kind, self.moment))

    def faults(self) -> dict[str, Fault]:
        """Who strikes: the victim itself, or, where it is elsewhere then, the sampler."""
        numbers = {"busy": prompts(2, 12)[5], "sync": 2, "onload": 2}
        if self.moment == "idle":
            return {}
        itself = self.victim in WORKERS and (self.victim, self.moment) != ("scorer/0", "sync")
        role = self.victim.removesuffix("/0") if itself else "sampler"
        victim = "" if itself else self.victim
        return {role: Fault(self.kind, numbers[self.moment], 0, self.moment, victim)}


def cells(*victims: str) -> list[Any]:
    found = []
    for one in itertools.product(victims, KINDS, MOMENTS):
        marks = [pytest.mark.timeout(BOUND_S, func_only=True)]
        if one in NOT_THERE:
            marks.append(pytest.mark.skip(reason=NOT_THERE[one]))
        if one not in QUICK:
            marks.append(pytest.mark.slow)
        found.append(pytest.param(Cell(*one), marks=marks, id=str(Cell(*one))))
    return found


def run(cell: Cell | None, folder: Path, pids: set[int]) -> list[Any]:
    """The outcomes of a run in which that happens. `pids` takes the processes seen."""
    shared_ray()
    struck = []
    with Cluster(CONFIG, "ray") as cluster:
        strike = serve_strikes(cluster)
        places = placements("temporal", cluster.devices, 12)
        groups = launch(cluster, places, cell.faults() if cell else {})

        def before(step: int) -> None:
            pids.update(s.pid for s in cluster.statistics() if s.pid is not None)
            if cell is None or (cell.moment, step) != ("idle", 3) or struck:
                return
            struck.append(step)
            if cell.victim in WORKERS and cell.kind in ("raise", "exit"):
                groups[WORKERS.index(cell.victim)].misbehave(cell.kind).result(BOUND_S)
            else:
                strike(Fault(cell.kind, 0, victim=cell.victim))

        return run_steps(
            cluster, groups, Checkpoints(folder, CheckpointConfig(every=1)), STEPS, before
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    outcomes = run(None, tmp_path_factory.mktemp("undisturbed"), set())
    assert outcomes[-1] == [number for step in range(1, STEPS + 1) for number in prompts(step, 12)]
    return outcomes


def check_gone(pids: set[int]) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process.cmdline() for process in alive] == []


@pytest.mark.parametrize("cell", cells(*WORKERS, "channel/0"))
def test_cell(cell: Cell, tmp_path: Path, undisturbed: list[Any]) -> None:
    expected = EXPECTED[cell.victim, cell.kind]
    pids: set[int] = set()
    if expected in (RECOVERS, IGNORES):
        assert run(cell, tmp_path, pids) == undisturbed
    elif expected is FAILS:
        with pytest.raises(WorkerError, match="ValueError: this is bad"):
            run(cell, tmp_path, pids)
    else:
        with pytest.raises(WorkerDied, match=re.escape("channel/0")):
            run(cell, tmp_path, pids)
    check_gone(pids)


PROGRAM = """
import json, sys
from pathlib import Path
from rlinf.workers import Cluster
from rlinf.workers.checkpoint import CheckpointConfig, Checkpoints
from rlinf.workers.testing import Fault, launch, placements, run_steps, serve_strikes

kind, moment, faults = sys.argv[1], sys.argv[2], eval(sys.argv[3])

def main():
    with Cluster(launcher="ray") as cluster:
        strike = serve_strikes(cluster)
        groups = launch(cluster, placements("temporal", cluster.devices, 12), faults)
        def before(step):
            if step == 2:
                print("ready", flush=True)
                assert sys.stdin.readline() == "go\\n"
            if moment == "idle" and step == 3:
                strike(Fault(kind, 0, victim="controller"))
        checkpoints = Checkpoints(Path("checkpoints"), CheckpointConfig(every=1))
        outcomes = run_steps(cluster, groups, checkpoints, 4, before)
    print(json.dumps(outcomes))

try:
    main()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short name: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.parametrize("cell", cells("controller"))
def test_cell_of_the_controller(
    cell: Cell, tmp_path: Path, temporary: Path, undisturbed: list[Any]
) -> None:
    """It holds the registry too: with it the job is over, and everybody else notices."""
    before = set(Path("/dev/shm").iterdir())
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, cell.kind, cell.moment, repr(cell.faults())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        process = psutil.Process(child.pid)
        family = [process, *process.children(recursive=True)]
        child.stdin.write("go\n")
        child.stdin.flush()
        if EXPECTED[cell.victim, cell.kind] is GOES_ON:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            os.kill(child.pid, signal.SIGCONT)
        out, err = child.communicate(timeout=BOUND_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    if EXPECTED[cell.victim, cell.kind] is GOES_ON:
        assert child.returncode == 0, err
        assert json.loads(out) == undisturbed
    else:
        assert child.returncode == CODES[cell.kind], err
        assert out == "" and "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=20)  # the janitor is one of them
    assert [one.cmdline() for one in alive] == []
    assert files_left(temporary) == []
    assert set(Path("/dev/shm").iterdir()) <= before

"""An app, the RLHF one by default, as a job of its own: started, watched, looked at and killed."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MAIN = ROOT / "apps" / "rlhf" / "main.py"
SHORT = ("steps=3", "sft.stop_at=0.15", "rollout.prompts=8", "rollout.samples=8")


def run(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAIN), *arguments], capture_output=True, text=True, timeout=timeout_s
    )


Arguments = tuple[str, ...]


class Ending(NamedTuple):
    """How the program ended: its exit code, and what it said."""

    code: int
    out: str
    err: str


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
from main import CHOICES, CONFIG, RlhfConfig, main_guard, train
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main_guard(train, RlhfConfig, CONFIG, json.loads(line), choices=CHOICES)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def run_each(runs: Sequence[Arguments], folder: Path) -> Mapping[Arguments, Ending]:
    """What comes of each of these arguments, one after another in one process: starting is slow.

    For what ends at once. Each is written to a folder of its own in `folder`, if it does not name
    one.
    """
    lines = []
    for number, arguments in enumerate(runs):
        named = any(argument.startswith(("folder=", "--")) for argument in arguments)
        lines.append(
            json.dumps([*([] if named else [f"folder={folder / str(number)}"]), *arguments])
        )
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, str(MAIN.parent)]
    given = "\n".join(lines)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    endings = [Ending(*json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(runs, endings, strict=True))


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tree(pid: int) -> dict[int, psutil.Process]:
    try:
        root = psutil.Process(pid)
        return {p.pid: p for p in [root, *root.children(recursive=True)]}
    except psutil.NoSuchProcess:
        return {}


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Return when the file has that many lines; fail when the process ends before."""
    deadline = time.monotonic() + 200
    while not path.exists() or path.read_text().count("\n") < count:
        if process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.1)  # polls a file that another program writes


class Started:
    """The app in a process group of its own, and everything that ever descended from it."""

    def __init__(self, folder: Path, *arguments: str, main: Path = MAIN) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(main), f"folder={folder}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.seen: dict[int, psutil.Process] = {}

    def wait_for_steps(self, count: int) -> None:
        wait_for_lines(self.folder / "metrics.jsonl", count, self.process)
        self.seen.update(tree(self.process.pid))

    def worker(self, group: str) -> psutil.Process:
        """The process that runs rank 0 of a group, by the name in its title."""
        self.seen.update(tree(self.process.pid))
        found = [p for p in self.seen.values() if p.is_running() and named(p, group)]
        assert len(found) == 1, [p.cmdline() for p in self.seen.values() if p.is_running()]
        return found[0]

    def end(self, timeout_s: float) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def left_behind(self) -> list[str]:
        """What still runs of all that was seen, after a short time to be reaped."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=10)
        return [" ".join(p.cmdline()) for p in alive]


def named(process: psutil.Process, group: str) -> bool:
    try:
        return f"{group}/0" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def losses(folder: Path) -> list[float]:
    """Loss and norm of the gradient of each step: the loss itself is 0 where nothing has moved."""
    return [line[name] for line in metrics(folder) for name in ("loss", "grad_norm")]

"""Soak: the RLHF app while a worker is killed every 20 seconds, beside an undisturbed run.

30 minutes, or 5 with --quick. Victims and the time within a step are drawn with a seed; three of
four are killed (SIGKILL), the fourth is stopped (SIGSTOP) and found out by its silence. Then the
same number of steps is run undisturbed, and the two learning curves are laid side by side.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

APP = Path(__file__).resolve().parent.parent / "apps" / "rlhf" / "main.py"
SETTINGS = ("checkpoint.every=10", "cluster.silence_s=8", "cluster.heartbeat_s=1")
VICTIMS = ("rollout/0", "reward/0", "trainer/0")
EVERY_S = 20.0
END_S = 120.0
PARTS = 10
STEPS = 1_000_000


@dataclass
class Job:
    """The app as it runs, and what was done to it."""

    folder: Path
    process: "subprocess.Popen[str]"
    struck: Counter[str] = field(default_factory=Counter)
    family: dict[int, psutil.Process] = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path, steps: int) -> "Job":
        """Start it for so many steps."""
        command = [sys.executable, str(APP), f"folder={folder}", f"steps={steps}", *SETTINGS]
        output = (folder.parent / f"{folder.name}.log").open("w")
        return cls(folder, subprocess.Popen(command, stdout=output, stderr=output, text=True))

    def rewards(self) -> list[float]:
        """The reward of each step so far."""
        return [line["reward"] for line in self.lines()]

    def lines(self) -> list[dict[str, float]]:
        """The metrics of each step so far; a line that is being written is left out."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def worker(self, name: str) -> psutil.Process | None:
        """The process of a worker, unless it is just being started."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family[process.pid] = process
            try:
                if name in " ".join(process.cmdline()):
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def strike(self, dice: random.Random) -> None:
        """Kill or stop a worker."""
        name = dice.choice(VICTIMS)
        victim = self.worker(name)
        if victim is None:
            self.struck["being started"] += 1
            return
        kind = signal.SIGSTOP if dice.random() < 0.25 else signal.SIGKILL
        victim.send_signal(kind)
        self.struck[f"{name} {kind.name}"] += 1

    def end(self) -> int:
        """Ctrl-C, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(END_S)

    def left_behind(self) -> int:
        """Processes of it that still run."""
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=20)
        return len(alive)


def measure(quick: bool) -> dict[str, object]:
    """Run both and compare."""
    minutes = 5 if quick else 30
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as name:
        disturbed = Job.start(Path(name) / "disturbed", STEPS)
        begun = time.monotonic()
        code = _disturb(disturbed, minutes * 60.0)
        seconds = time.monotonic() - begun
        steps = len(disturbed.lines())
        log = (Path(name) / "disturbed.log").read_text()
        if code:
            print("\n" + "\n".join(log.splitlines()[-20:]))
        if not steps:
            raise SystemExit("the disturbed run did no step; what it said is above")
        quiet = Job.start(Path(name) / "quiet", steps)
        begun = time.monotonic()
        quiet_code = quiet.process.wait()
        quiet_s = time.monotonic() - begun
        return _compared(disturbed, quiet, log) | {
            "steps": steps,
            "seconds": round(seconds),
            "seconds_undisturbed": round(quiet_s),
            "exit_codes": [code, quiet_code],
            "left_behind": disturbed.left_behind(),
        }


def _disturb(job: Job, seconds: float) -> int:
    """Strike until the time is over, then end it."""
    dice, over = random.Random(0), threading.Event()
    until = time.monotonic() + seconds
    while len(job.lines()) < 3 and job.process.poll() is None:
        over.wait(0.5)
    while time.monotonic() < until and job.process.poll() is None:
        over.wait(EVERY_S + dice.uniform(-2, 2))
        if job.process.poll() is None:
            job.strike(dice)
    while job.process.poll() is None and not all(map(job.worker, VICTIMS)):
        over.wait(0.5)
    return job.end()


def _compared(disturbed: Job, quiet: Job, log: str) -> dict[str, object]:
    """Print and return how the two went."""
    one, other = disturbed.rewards(), quiet.rewards()
    print(f"\nstruck: {dict(disturbed.struck)}")
    print(f"steps back to a checkpoint: {log.count('went back to step')}")
    print(f"\n  {'steps':>14}{'disturbed':>12}{'undisturbed':>14}   mean reward")
    curve, size = [], max(1, len(one) // PARTS)
    for start in range(0, len(one), size):
        pair = [sum(run[start : start + size]) / len(run[start : start + size])
                for run in (one, other) if run[start : start + size]]  # fmt: skip
        curve.append([start + 1, *(round(value, 4) for value in pair)])
        print(
            f"  {start + 1:>6} - {min(start + size, len(one)):>5}{pair[0]:>12.3f}{pair[-1]:>14.3f}"
        )
    apart = max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)
    counts = {line["scored"] + line["unscored"] for line in disturbed.lines()}
    print(f"\nlargest difference of one step's reward: {apart:.4f}; samples a step: {counts}")
    return {
        "struck": dict(disturbed.struck),
        "went_back": log.count("went back to step"),
        "curve": curve,
        "largest_difference": apart,
        "samples_a_step": sorted(counts),
    }

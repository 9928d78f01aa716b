"""What all benchmarks share: interleaved rounds, ratios within a round, the machine's line, JSON.

Machines are noisy: only figures of the same round are compared, and the middle one of many counts.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from importlib import metadata
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "protobuf", "torch", "ray")
PATIENCE_S = 600.0
"""How long a contestant may take to begin, to do it once, or to end."""

Samples = dict[str, list[float]]


class Rival:
    """A contestant that another Python runs, one that has what ours has not.

    Its script reads settings as JSON from the first line of standard input; then it does what each
    further line asks for, and answers with a line. In between it is stopped: some spin where they
    wait, and would take the time of whose turn it is.
    """

    def __init__(self, python: Path, script: Path, settings: object) -> None:
        if not python.exists():
            raise SystemExit(f"there is no {python}: see the first lines of the benchmark")
        self._script = script
        self._process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._say(settings)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, question: object = None) -> None:
        """Have it do what `question` says, as JSON."""
        os.killpg(self.pid, signal.SIGCONT)
        self._say(question)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit(f"it ended: run {self._script} by itself to see why")
        os.killpg(self.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End it and what it has started."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


class Apart:
    """A contestant in a process of its own: threads that others started do not slow it down.

    Args:
        open: Called there with `args`; gives what is to be timed, and ends it.
    """

    def __init__(
        self, open: Callable[..., AbstractContextManager[Callable[[], object]]], *args: object
    ) -> None:
        spawn = get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there, open, args))
        self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self) -> None:
        """Have it done once; SystemExit where its process ended or says nothing."""
        try:
            self._pipe.send(True)
            if self._pipe.poll(PATIENCE_S):
                self._pipe.recv()
                return
        except (EOFError, OSError) as error:
            raise SystemExit("a contestant ended: what it said is above") from error
        raise SystemExit(f"a contestant said nothing for {PATIENCE_S:g} s")

    def close(self) -> None:
        """End the process and what it has started."""
        with suppress(OSError):  # it has ended already
            self._pipe.send(False)
        self._process.join(PATIENCE_S)
        self._process.kill()
        self._process.join()


def _serve(
    pipe: "Connection[Any, Any]",
    open: Callable[..., AbstractContextManager[Callable[[], object]]],
    args: tuple[object, ...],
) -> None:
    with open(*args) as run:
        while pipe.recv():
            run()
            pipe.send(True)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        **versions,
    }


def machine_line() -> str:
    """The same in one line."""
    facts = machine()
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", *PACKAGES))
    return f"{facts['cpu']}, {facts['cores']} cores, {versions}; load {facts['load']:.1f} at start"


def race(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    patience_s: float = 6.0,
) -> Samples:
    """Run every contestant once a round and time it, in seconds.

    Args:
        contestants: What to time, by name.
        rounds: How often, at most.
        warmup: Rounds before these that are not counted.
        patience_s: No new round begins after this long (three rounds are always run).
    """
    samples: Samples = {name: [] for name in contestants}
    begun = time.monotonic()
    for number in range(warmup + rounds):
        if number >= warmup + 3 and time.monotonic() - begun > patience_s:
            break
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if number >= warmup:
                samples[name].append(seconds)
    return samples


def ratio(samples: Samples, name: str, floor: str) -> float:
    """How many times the floor's time a contestant took: the middle of the rounds' ratios."""
    pairs = zip(samples[name], samples[floor], strict=True)
    return statistics.median(one / other for one, other in pairs)


def show(title: str, samples: Samples, floor: str, *, each: int = 1) -> list[dict[str, object]]:
    """Print a table, fastest first, and return its rows.

    Args:
        title: The question.
        samples: What `race` gave.
        floor: The contestant that others are compared to.
        each: How many operations one sample was.
    """
    rows = []
    for name, times in samples.items():
        middle = statistics.median(times) / each
        rows.append(
            {
                "name": name,
                "median_us": round(middle * 1e6, 2),
                "best_us": round(min(times) / each * 1e6, 2),
                "times_floor": round(ratio(samples, name, floor), 2),
                "rounds": len(times),
            }
        )
    rows.sort(key=lambda row: float(str(row["median_us"])))
    print(f"\n{title}  (floor: {floor}; {rows[0]['rounds']} rounds)")
    print(f"  {'':34}{'median':>12}{'best':>12}{'x floor':>10}{'per second':>14}")
    for row in rows:
        middle = float(str(row["median_us"]))
        print(
            f"  {row['name']:34}{time_of(middle):>12}{time_of(float(str(row['best_us']))):>12}"
            f"{row['times_floor']:>10}{1e6 / middle:>14,.0f}"
        )
    return rows


def time_of(microseconds: float) -> str:
    """A time to read."""
    if microseconds >= 1000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds:.1f} us"


def save(name: str, questions: Mapping[str, object]) -> Path:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "questions": questions}, indent=1) + "\n")
    return path

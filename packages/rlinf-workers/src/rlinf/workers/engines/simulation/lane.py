"""One process of a simulator, as seen from outside: started, told what to do, watched, replaced."""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import psutil

from rlinf.workers.config import worker_environment
from rlinf.workers.engines.simulation.memory import Memory
from rlinf.workers.engines.simulation.process import COMMAND, DONE, LENGTH
from rlinf.workers.engines.simulation.stepper import Opening
from rlinf.workers.environments import EnvironmentSpec
from rlinf.workers.errors import WorkerError
from rlinf.workers.roles.simulator import Actor, Demonstration, Spaces

__all__ = ["EnvironmentLost", "Lane", "Patience", "demonstrate", "film", "find_spaces"]

log = logging.getLogger(__name__)

LAST_WORDS_BYTES = 1 << 14
NOTE = "see docs/"
"""What errors of ours say after their message."""


class EnvironmentLost(WorkerError):
    """An environment cannot be kept alive: its process ends or gets stuck again and again."""

    FIELDS = ("cause", "environment", "pid")
    environment: int | None
    cause: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds allowed: for one call of one environment, and for it to be made."""

    deadline_s: float
    start_s: float


class Lane:
    """One process with the environments `first` to `first + count - 1`. Not thread-safe.

    Attributes:
        number: Which lane.
        own: Its columns of the memory.
        failures: How often its process was lost since it last did all it was asked.
    """

    def __init__(self, number: int, opening: Opening, memory: Memory, patience: Patience) -> None:
        self.number, self._opening, self._memory = number, opening, memory
        self.own = slice(opening.first, opening.first + opening.count)
        self.failures = 0
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._ready = self._waiting = False
        self._seen: tuple[int, ...] = ()
        self._since = 0.0
        self.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid if self._process else -1

    def cpu_s(self) -> float:
        """Processor seconds of its process; 0 where there is none."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except (psutil.NoSuchProcess, ValueError):
            return 0.0
        return float(times.user + times.system)

    def fileno(self) -> int:
        """Readable when the process has answered, or ended."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self) -> None:
        """Start the process and return at once: its first answer says that it is ready."""
        self._errors = tempfile.TemporaryFile("ab+")  # noqa: SIM115 - `kill` closes it
        descriptor = self._memory.descriptor
        self._process = _popen(self._opening.spec, self._errors, (descriptor,))
        self._ready, self._waiting = False, True
        self._seen, self._since = (), time.monotonic()
        _tell(self._process, _first(self._opening))

    def tell(self, letter: bytes, number: int = 0) -> None:
        """Give a command. One that cannot be given is noticed when its answer is waited for."""
        assert self._process is not None
        self._waiting, self._seen = True, ()
        _tell(self._process, COMMAND.pack(letter, number))

    def answer(self) -> bool:
        """Read an answer that has come; false where the process has ended instead."""
        answered = os.read(self.fileno(), 1) == DONE
        self._waiting = not answered
        self._ready = self._ready or answered
        return answered

    @property
    def waiting(self) -> bool:
        """It owes an answer."""
        return self._waiting

    def is_stuck(self, now: float) -> bool:
        """Whether one environment has been at one call for longer than allowed."""
        ticks = tuple(self._memory["ticks"][self.own])
        if ticks != self._seen:
            self._seen, self._since = ticks, now
            return False
        limit = self._patience.deadline_s if self._ready else self._patience.start_s
        return self._waiting and now - self._since > limit

    def culprit(self) -> int:
        """Index of the environment whose call is under way, else of the lane's first."""
        busy = self._memory["busy"][self.own]
        return self.own.start + (int(busy.argmax()) if busy.any() else 0)

    def lose(self, stuck: bool, again: int) -> None:
        """End the process, say whose fault it was, start another one.

        Raises `EnvironmentLost` when that was done `again` times already with nothing in between.
        """
        culprit, pid = self.culprit(), self.pid
        cause = self.kill()
        if stuck:
            ready = self._patience.deadline_s if self._ready else self._patience.start_s
            cause = f"it was at one call for more than {ready:g} s, and was killed"
        self.failures += 1
        label = self._opening.spec.label
        text = f"environment {culprit} ({label}, process {pid}): {cause}"
        if self.failures > again:
            raise EnvironmentLost(
                f"{text}. Its process was lost {self.failures} times in a row; restarts={again} "
                "allow no more",
                environment=culprit,
                cause=cause,
                pid=pid,
            )
        log.warning("%s; its process is replaced", text)
        self._memory["busy"][self.own] = False
        self.start()

    def kill(self) -> str:
        """End the process at once; how it ended, and its last words."""
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if process is None or errors is None:
            return "it was not running"
        process.kill()
        how = _ending(process.wait())
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with errors:
            words = _last_line(errors)
        return f"{how}: {words}" if words else how

    def pin(self, cores: Sequence[int]) -> None:
        """Let the process compute on these cores."""
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self.pid, cores)


def find_spaces(spec: EnvironmentSpec, timeout_s: float) -> Spaces:
    """What the environment shows and takes, asked for in a process of its own.

    Raises `EnvironmentLost`: it could not be made.
    """
    spaces: Spaces = _ask(Opening(tuple(sys.path), spec), timeout_s)
    return spaces


def film(
    spec: EnvironmentSpec, actor: Actor, seed: int, steps: int, timeout_s: float
) -> list[npt.NDArray[np.uint8]]:
    """Pictures of one episode in which `actor` takes the likeliest choices, [H, W, 3] each.

    In a process of its own, because renderers end their process now and then.

    Raises `EnvironmentLost`: there are none, and why.
    """
    frames: list[npt.NDArray[np.uint8]] = _ask(
        Opening(tuple(sys.path), spec, seed=seed, actor=actor, film=steps), timeout_s
    )
    return frames


def demonstrate(
    spec: EnvironmentSpec, seeds: Sequence[int], steps: int, noise: float, timeout_s: float
) -> list[Demonstration]:
    """An episode of the environment's own script for each seed, in a process of its own.

    Raises `EnvironmentLost`: there are none, and why.
    """
    opening = Opening(
        tuple(sys.path), spec, demonstrate=steps, noise=noise, seeds=tuple(map(int, seeds))
    )
    shown: list[Demonstration] = _ask(opening, timeout_s)
    return shown


def _ask(opening: Opening, timeout_s: float) -> Any:
    """What a process for this alone answers."""
    with tempfile.TemporaryFile("ab+") as errors:
        process = _popen(opening.spec, errors, ())
        try:
            answer, _ = process.communicate(_first(opening), timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            answer, cause = b"", f"it was not made within {timeout_s:g} s"
        else:
            cause = _last_line(errors) or _ending(process.returncode)
    if process.returncode or not answer:
        raise EnvironmentLost(f"{opening.spec.label} cannot be made: {cause}", cause=cause)
    return pickle.loads(answer)


def _popen(
    spec: EnvironmentSpec, errors: IO[bytes], descriptors: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    variables = {**worker_environment(1), **spec.variables}
    return subprocess.Popen(
        [
            "/usr/bin/env",
            *(f"{name}={value}" for name, value in variables.items()),
            sys.executable,
            "-m",
            "rlinf.workers.engines.simulation.process",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        start_new_session=True,
        pass_fds=descriptors,
    )


def _first(opening: Opening) -> bytes:
    """The path is read before what needs it to be understood."""
    body = pickle.dumps((opening.path, pickle.dumps(opening)))
    return LENGTH.pack(len(body)) + body


def _tell(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while left:
            left = left[os.write(process.stdin.fileno(), left) :]


def _ending(code: int) -> str:
    return f"it ended by signal {-code}" if code < 0 else f"it ended with {code}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(-min(errors.seek(0, os.SEEK_END), LAST_WORDS_BYTES), os.SEEK_END)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    said = [line for line in lines if not line.startswith(NOTE)]
    return said[-1] if said else ""

"""A tool that runs a model's programs, each in a process of its own that is limited and killed.

What a program prints is its answer, and so is the error that ended it or that it took too long: the
model is to learn from that. `ToolFailed` only where no process could be started.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer

from rlinf.workers.bounds import Count
from rlinf.workers.roles.tool import ToolFailed

__all__ = ["PythonConfig", "PythonTool"]

PROGRAM = Path(__file__).with_name("python_process.py")
PATIENCE = 6
"""Seconds by the clock allowed for one of processor time: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class PythonConfig:
    """What a program may use.

    Attributes:
        seconds: Of processor time.
        memory_bytes: Address space.
        answer_bytes: Of what it prints; the rest is cut off, and the program with it.
        processes: Programs at the same time.
    """

    seconds: Count = 2
    memory_bytes: Count = 1 << 29
    answer_bytes: Count = 4096
    processes: Count = 2


class PythonTool:
    """A `Tool` whose argument is a program in Python."""

    def __init__(self, config: PythonConfig | None = None) -> None:
        self._config = config or PythonConfig()

    def call(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """See `Tool`."""
        with ThreadPoolExecutor(self._config.processes) as threads:
            return list(threads.map(lambda program: self._run(program, timeout_s), arguments))

    def _run(self, program: str, timeout_s: float) -> str:
        config = self._config
        left = min(timeout_s, config.seconds * PATIENCE)
        command = [sys.executable, "-I", str(PROGRAM), str(config.seconds)]
        with tempfile.TemporaryDirectory(prefix="rlinf-tool-") as folder:
            try:
                process = subprocess.Popen(
                    [*command, str(config.memory_bytes)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={},
                    start_new_session=True,
                )
            except OSError as error:
                raise ToolFailed(f"no process could be started: {error.strerror}") from error
            return self._answer(process, program, left)

    def _answer(self, process: subprocess.Popen[bytes], program: str, left: float) -> str:
        limit, late = self._config.answer_bytes, Event()

        def give_up() -> None:
            late.set()
            _end(process)

        timer = Timer(left, give_up)
        timer.start()
        printed = b""
        try:
            assert process.stdin is not None and process.stdout is not None
            with process.stdout, contextlib.suppress(OSError):
                with process.stdin:
                    process.stdin.write(program.encode(errors="replace"))
                printed = process.stdout.read(limit + 1)
            status = process.wait() if len(printed) <= limit else 0
        finally:
            timer.cancel()
            _end(process)
            process.wait()
        text = printed[:limit].decode(errors="replace").rstrip()
        if len(printed) > limit:
            return f"{text}\n(more was printed)"
        if late.is_set() or status == -signal.SIGXCPU:
            return f"{text}\nit took longer than {self._config.seconds} s".lstrip()
        return text or "nothing was printed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

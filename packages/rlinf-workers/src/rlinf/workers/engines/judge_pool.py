"""Judges in processes of their own, which are killed when a verdict takes too long.

For verifiers that run for ever on some answers, exhaust memory, or work on a main thread only. What
could not be judged is `unscored`; the verdict on one answer never depends on the others.
"""

import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from signal import SIGPROF
from typing import IO, Any, Self

from rlinf.workers.bounds import Count, Natural, Positive
from rlinf.workers.engines.judge_process import frame
from rlinf.workers.engines.rule_reward import Judge
from rlinf.workers.errors import WorkerError
from rlinf.workers.roles.reward import STATUSES, Score, ScoredGroup
from rlinf.workers.roles.rollout import Group

__all__ = ["JudgeFailed", "JudgePool", "PoolConfig", "PoolStatistics", "PooledReward"]

log = logging.getLogger(__name__)

UNSCORED = Score(0.0, "unscored")
PATIENCE = 6.0
"""Seconds by the clock allowed for a second of processor time: the machine may be busy."""
LONGEST_ANSWER_BYTES = 1 << 16
MAX_ERRORS_BYTES = 1 << 20

Answer = tuple[str, int]
"""A response and its item."""


class JudgeFailed(WorkerError):
    """The judge's process did not start, so nothing can be judged."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How answers are judged.

    Attributes:
        processes: Judges at work at the same time.
        deadline_s: Processor time for one verdict; six times as long by the clock.
        start_s: Time by the clock for a process to be ready.
        memory_bytes: Address space of a judge's process; 0: no bound.
    """

    processes: Count = 1
    deadline_s: Positive = 5.0
    start_s: Positive = 120.0
    memory_bytes: Natural = 4 << 30

    def __post_init__(self) -> None:
        if self.processes < 1 or self.deadline_s <= 0 or self.start_s <= 0:
            raise ValueError(f"{self}: at least one process, deadlines above 0")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool has done so far.

    Attributes:
        judged: Answers with a verdict.
        late: Answers whose judge was killed at the deadline.
        died: Answers whose judge died of something else: its memory, an error, a signal.
    """

    judged: int = 0
    late: int = 0
    died: int = 0


class JudgePool:
    """Judges answers in processes. Thread-safe: calls take turns.

    Args:
        make: Makes the judge, in each process; it and what it holds must be picklable.
        config: See `PoolConfig`.
    """

    def __init__(self, make: Callable[[], Judge], config: PoolConfig | None = None) -> None:
        settings = config or PoolConfig()
        limits = (settings.deadline_s, settings.memory_bytes)
        opening = b"".join(map(frame, (sys.path, make, *limits)))
        self._lock = threading.Lock()
        self._members = [_Member(opening, settings) for _ in range(settings.processes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def judge(self, answers: Sequence[Answer]) -> list[Score]:
        """The verdict on each answer, in order. Raises `JudgeFailed`."""
        scores = [UNSCORED] * len(answers)
        places: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(len(answers)):
            places.put(place)

        def work(member: _Member) -> None:
            while True:
                try:
                    place = places.get_nowait()
                except queue.Empty:
                    return
                scores[place] = member.judge(answers[place])

        with self._lock, ThreadPoolExecutor(len(self._members)) as threads:
            for done in [threads.submit(work, member) for member in self._members]:
                done.result()
        return scores

    def statistics(self) -> PoolStatistics:
        """What was done so far."""
        counts = [member.counts for member in self._members]
        return PoolStatistics(*(sum(count[i] for count in counts) for i in range(3)))

    def close(self) -> None:
        """End all processes, now. A later call of `judge` starts new ones."""
        with self._lock:
            for member in self._members:
                member.kill()


class PooledReward:
    """A `RewardEngine` that has each response judged, as text, by a `JudgePool`.

    `decode` turns token ids into text, with everything that ends a response still in it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], pool: JudgePool) -> None:
        self._decode, self._pool = decode, pool

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One verdict a sample, judged all together. See `RewardEngine`."""
        answers = [(self._decode(g.own(i).tolist()), g.item) for g in groups for i in range(g.n)]
        scores = iter(self._pool.judge(answers))
        return [ScoredGroup.of(group, [next(scores) for _ in range(group.n)]) for group in groups]


class _Member:
    """One process, started when it is needed. Not thread-safe."""

    def __init__(self, opening: bytes, config: PoolConfig) -> None:
        self._opening, self._config = opening, config
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._last_words = ""
        self.counts = [0, 0, 0]

    def judge(self, answer: Answer) -> Score:
        """The verdict; a process that could not give it is gone afterwards."""
        process = self._running()
        line = _exchange(process, frame(answer), PATIENCE * self._config.deadline_s)
        if line:
            self.counts[0] += 1
            self._forget_errors()
            return _score(line)
        code = self.kill()
        late = line is None or code == -SIGPROF
        self.counts[1 if late else 2] += 1
        if not late:
            log.warning("a judge ended with %s: %s", code, self._last_words)
        return UNSCORED

    def kill(self) -> int:
        """End the process; its exit code."""
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if process is None or errors is None:
            return 0
        process.kill()
        code = process.wait()
        errors.seek(-min(errors.seek(0, os.SEEK_END), LONGEST_ANSWER_BYTES), os.SEEK_END)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        self._last_words = lines[-1] if lines else "it said nothing"
        for pipe in (process.stdin, process.stdout, errors):
            if pipe is not None:
                pipe.close()
        return code

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        self._errors = tempfile.TemporaryFile("ab+")  # noqa: SIM115 - `kill` closes it
        command = [sys.executable, "-m", "rlinf.workers.engines.judge_process"]
        process = self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        if not _exchange(process, self._opening, self._config.start_s):
            self.kill()
            raise JudgeFailed(
                f"a judge was not ready within {self._config.start_s:g} s: {self._last_words}"
            )
        return process

    def _forget_errors(self) -> None:
        """Keep a talkative judge from filling the disk."""
        if self._errors is not None and os.fstat(self._errors.fileno()).st_size > MAX_ERRORS_BYTES:
            self._errors.truncate(0)


def _exchange(process: subprocess.Popen[bytes], data: bytes, timeout_s: float) -> bytes | None:
    """Write `data` and return the line that comes back.

    Empty where the process ended or said too much; None where it took too long, for either.
    """
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + timeout_s
    left, found = memoryview(data), b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, events in ready:
                if events & selectors.EVENT_WRITE:
                    try:
                        left = left[os.write(key.fd, left) :]
                    except BrokenPipeError:
                        return b""
                    if not left:
                        selector.unregister(key.fileobj)
                else:
                    piece = os.read(key.fd, LONGEST_ANSWER_BYTES)
                    found += piece
                    if not piece or len(found) > LONGEST_ANSWER_BYTES:
                        return b""
    return found


def _score(line: bytes) -> Score:
    """The verdict in a line. What a judge's process says is not trusted to be one."""
    try:
        answer: Any = json.loads(line)
        value, status = answer
        return Score(float(value), status) if status in STATUSES else UNSCORED
    except (TypeError, ValueError):
        return UNSCORED

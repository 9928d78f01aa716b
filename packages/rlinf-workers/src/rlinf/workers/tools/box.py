"""Carries out the calls of many episodes: each with a deadline and bounded tries.

Calls of one tool that wait at the same time are given to it together. Those of a batch that failed
are tried again one by one, so that one which a tool cannot digest harms no other. A call that has
no answer at its deadline is over for the episode, even if the tool never returns.
"""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rlinf.workers.bounds import Count, NonNegative, Positive
from rlinf.workers.roles.tool import Observation, Tool, ToolFailed

__all__ = ["ToolBox", "ToolConfig", "ToolStatistics"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """How tools are called.

    Attributes:
        deadline_s: For one call, with all its tries and pauses.
        tries: At most so many.
        pause_s: Before the second try; twice as long before each further one.
        batch: Calls given to a tool at once, at most.
        threads: Calls of tools under way at the same time, at most; one that never returns keeps
            its place.
    """

    deadline_s: Positive = 10.0
    tries: Count = 2
    pause_s: NonNegative = 0.2
    batch: Count = 64
    threads: Count = 8


@dataclass(frozen=True, slots=True)
class ToolStatistics:
    """What was done so far.

    Attributes:
        calls: Calls taken.
        failed: Of these, those without an answer.
        late: Of the failed, those that were given up at the deadline.
        batches: How often a tool was asked.
        busy_s: Seconds from each call to its answer, summed.
    """

    calls: int = 0
    failed: int = 0
    late: int = 0
    batches: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Call:
    tool: str
    argument: str
    begun: float
    deadline: float
    tries: int = 0
    not_before: float = 0.0
    cause: str = "it gave no answer in time"


@dataclass(slots=True)
class _Counts:
    calls: int = 0
    failed: int = 0
    late: int = 0
    batches: int = 0
    busy_s: float = 0.0


class ToolBox:
    """Calls `tools`, by name, from threads of its own. Thread-safe.

    Args:
        tools: What there is to call.
        config: See `ToolConfig`.
    """

    def __init__(self, tools: Mapping[str, Tool], config: ToolConfig | None = None) -> None:
        self.tools, self._config = dict(tools), config or ToolConfig()
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._open: dict[int, _Call] = {}
        self._queue: deque[int] = deque()
        self._done: list[tuple[int, Observation]] = []
        self._counts = _Counts()
        self._threads = self._idle = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more calls and forget those under way. Threads inside a tool are left to it."""
        with self._changed:
            self._closed = True
            self._open.clear()
            self._queue.clear()
            self._changed.notify_all()

    def submit(self, tool: str, argument: str) -> int:
        """Have a tool called; returns at once with the number under which `collect` answers.

        Raises `KeyError` where there is no such tool.
        """
        if tool not in self.tools:
            raise KeyError(f"there is no tool {tool!r}; there are {', '.join(sorted(self.tools))}")
        now = time.monotonic()
        with self._changed:
            number = next(self._numbers)
            self._open[number] = _Call(tool, argument, now, now + self._config.deadline_s)
            self._queue.append(number)
            self._counts.calls += 1
            if not self._idle and self._threads < self._config.threads:
                self._threads += 1
                threading.Thread(target=self._work, name="rlinf-tool", daemon=True).start()
            self._changed.notify_all()
        return number

    def collect(self, timeout_s: float = 0.0) -> list[tuple[int, Observation]]:
        """The calls that are over since the last time; waits until there is one, or so long.

        Returns nothing at once where no call is under way.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                self._give_up(now)
                if self._done or not self._open or now >= until:
                    done, self._done = self._done, []
                    return done
                nearest = min(call.deadline for call in self._open.values())
                self._changed.wait(min(until, nearest) - now)

    def forget(self, number: int) -> None:
        """Nobody waits for this call any more."""
        with self._changed:
            self._open.pop(number, None)
            self._done = [done for done in self._done if done[0] != number]

    def statistics(self) -> ToolStatistics:
        """What was done so far."""
        with self._changed:
            c = self._counts
            return ToolStatistics(c.calls, c.failed, c.late, c.batches, c.busy_s)

    # -- under the lock ---------------------------------------------------------------------------

    def _give_up(self, now: float) -> None:
        for number in [n for n, call in self._open.items() if now >= call.deadline]:
            self._counts.late += 1
            self._fail(number, now)

    def _fail(self, number: int, now: float) -> None:
        call = self._open[number]
        self._counts.failed += 1
        log.warning("%s(%.60r) failed: %s", call.tool, call.argument, call.cause)
        self._finish(number, f"{call.tool} failed: {call.cause}", "failed", now)

    def _finish(self, number: int, text: str, status: str, now: float) -> None:
        call = self._open.pop(number)
        self._counts.busy_s += now - call.begun
        observation = Observation(text, status, now - call.begun, call.tries)  # type: ignore[arg-type]
        self._done.append((number, observation))
        self._changed.notify_all()

    def _take(self) -> list[tuple[int, _Call]]:
        """Calls of one tool that may be made now; waits for some. Empty once the box is closed."""
        while not self._closed:
            now = time.monotonic()
            self._queue = deque(n for n in self._queue if n in self._open)
            waiting = [(n, self._open[n]) for n in self._queue]
            ready = [(n, call) for n, call in waiting if call.not_before <= now]
            if ready:
                first = ready[0][1]
                alike = [x for x in ready if x[1].tool == first.tool and not x[1].tries]
                chosen = ready[:1] if first.tries else alike[: self._config.batch]
                taken = {n for n, _ in chosen}
                self._queue = deque(n for n in self._queue if n not in taken)
                return chosen
            self._idle += 1
            pause = min((call.not_before - now for _, call in waiting), default=None)
            self._changed.wait(pause)
            self._idle -= 1
        return []

    def _settle(self, chosen: list[tuple[int, _Call]], answers: list[str] | ToolFailed) -> None:
        now = time.monotonic()
        for place, (number, call) in enumerate(chosen):
            if self._open.get(number) is not call:
                continue  # it was given up, or forgotten
            if isinstance(answers, ToolFailed):
                call.cause = answers.message
                alone = len(chosen) == 1
                if call.tries >= self._config.tries or (answers.final and alone):
                    self._fail(number, now)
                else:
                    pause = self._config.pause_s * math.ldexp(1.0, call.tries - 1)
                    call.not_before = now + pause
                    self._queue.append(number)
            else:
                self._finish(number, answers[place], "ok", now)
        self._changed.notify_all()

    # -- on a thread of the box -------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                chosen = self._take()
                if not chosen:
                    self._threads -= 1
                    return
                self._counts.batches += 1
                for _, call in chosen:
                    call.tries += 1
            answers = self._ask(chosen)
            with self._changed:
                self._settle(chosen, answers)

    def _ask(self, chosen: list[tuple[int, _Call]]) -> list[str] | ToolFailed:
        first = chosen[0][1]
        left = min(call.deadline for _, call in chosen) - time.monotonic()
        try:
            asked = [call.argument for _, call in chosen]
            answers = self.tools[first.tool].call(asked, max(left, 1e-3))
        except ToolFailed as error:
            return error
        except Exception as error:
            log.warning("the tool %s has a defect", first.tool, exc_info=True)
            return ToolFailed(f"{type(error).__name__}: {error}", final=True)
        if len(answers) != len(chosen):
            return ToolFailed(f"it gave {len(answers)} answers to {len(chosen)} calls", final=True)
        return answers

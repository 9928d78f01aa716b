"""How far a run is, on the screen: a bar in a terminal, a line now and then in a log.

A display that fails (a terminal that went away, a full disk under a log) is never a reason for a
run to fail: it falls silent.
"""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Display", "display"]

LINE_EVERY_S = 10.0


class Display(Protocol):
    """What a run shows itself on. Nothing here raises."""

    def start(self) -> None:
        """Begin to show."""

    def stop(self) -> None:
        """Leave the screen as a program expects it."""

    def begin(self, steps: int) -> None:
        """There will be so many steps."""

    def show(self, step: int, text: str) -> None:
        """So many steps are done, with these results."""

    def say(self, text: str) -> None:
        """What is being done now."""

    def print(self, text: str) -> None:
        """A text of its own, which stays."""


class _Silence:
    """Shows nothing."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def begin(self, steps: int) -> None: ...
    def show(self, step: int, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def print(self, text: str) -> None: ...


class _Bar:
    """A progress bar at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("steps", shown="")

    def start(self) -> None:
        _quietly(self._progress.start)

    def stop(self) -> None:
        _quietly(self._progress.stop)

    def begin(self, steps: int) -> None:
        _quietly(lambda: self._progress.update(self._task, total=steps))

    def show(self, step: int, text: str) -> None:
        _quietly(lambda: self._progress.update(self._task, completed=step, shown=text))

    def say(self, text: str) -> None:
        _quietly(lambda: self._progress.update(self._task, shown=text))

    def print(self, text: str) -> None:
        _quietly(lambda: self._progress.console.print(text, highlight=False, markup=False))


class _Lines:
    """A line for what is said, and for the first, the last and every so many seconds' step."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console = console
        self._every_s = every_s
        self._steps = 0
        self._last = float("-inf")

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def begin(self, steps: int) -> None:
        self._steps = steps

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        due = step == self._steps or now - self._last >= self._every_s
        if text and due:
            self._last = now
            self.print(f"step {step}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        self.print(text)

    def print(self, text: str) -> None:
        _quietly(lambda: self._console.print(text, highlight=False, markup=False, soft_wrap=True))


def display(
    show: bool = True, console: Console | None = None, every_s: float = LINE_EVERY_S
) -> Display:
    """The display that fits where `console` (standard output) goes; lines come every so often."""
    console = console or Console()
    if not show:
        return _Silence()
    return _Bar(console) if console.is_terminal else _Lines(console, every_s)


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except (OSError, ValueError):  # the stream is gone, or closed
        return

"""Items that were brought along to a consumer and are not begun."""

from collections import deque
from collections.abc import Iterable

from rlinf.channel.batching import cargos
from rlinf.channel.cargo import Cargo
from rlinf.channel.run import Run
from rlinf.channel.spans import Ranges


class Local:
    """Runs in the order in which they came; given out whole, in part or one by one."""

    __slots__ = ("_cargos", "_runs", "_used", "count")

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._cargos: list[Cargo] = []
        """The items of the first run, where they are given out one by one."""
        self._used = 0
        """How many of these were."""
        self.count = 0
        """Items in it."""

    def __len__(self) -> int:
        return self.count

    def add(self, runs: Iterable[Run]) -> None:
        """Add runs behind what is here."""
        for run in runs:
            self._runs.append(run)
            self.count += run.count

    def pop(self) -> tuple[int, Cargo]:
        """The next item and its tag; there must be one."""
        if not self._cargos:
            self._cargos = cargos(self._runs[0])
        at = self._used
        tag, cargo = self._runs[0].order + at, self._cargos[at]
        self._used = at + 1
        self.count -= 1
        if self._used == len(self._cargos):
            self._runs.popleft()
            self._cargos, self._used = [], 0
        return tag, cargo

    def take(self, count: int) -> list[Run]:
        """The next so many items, which must be here."""
        self._tidy()
        taken: list[Run] = []
        while count:
            run = self._runs[0]
            part = self._runs.popleft() if run.count <= count else run.split(count)
            taken.append(part)
            count -= part.count
            self.count -= part.count
        return taken

    def ranges(self) -> Ranges:
        """The tags of all."""
        self._tidy()
        flat: list[int] = []
        for run in self._runs:
            flat += (run.order, run.order + run.count - 1)
        return tuple(flat)

    def clear(self) -> Ranges:
        """Drop everything; the tags."""
        tags = self.ranges()
        self._runs.clear()
        self.count = 0
        return tags

    def _tidy(self) -> None:
        """Cut off what was given out one by one."""
        if self._used:
            self._runs[0].split(self._used)
        self._cargos, self._used = [], 0

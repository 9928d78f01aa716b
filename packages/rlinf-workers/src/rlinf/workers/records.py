"""What a stage did, chunk by chunk: the one source for graph, profile, trace and drift.

Times are seconds since the Unix epoch, comparable between processes of a host; each record's
durations are differences of a monotonic clock laid on its start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["ChunkRecord", "RecordSink", "StageReport"]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One chunk's way through a stage on one worker.

    The `finish` method of a stage that works in chunks has a record of its own, without items.

    Attributes:
        worker: "group/rank".
        stage: Name of the method.
        iteration: Number of the iteration that the chunk belongs to.
        input: Name of the channel the chunk came from.
        output: Name of the channel its results went to; empty for the last stage.
        start: When the stage's function was called (its devices held and loaded).
        end: When it had returned, its outputs were committed and the chunk acknowledged.
        seconds: Time of work on the devices: without waits, loading and freeing.
        waited_s: Time spent waiting for the chunk.
        locked_s: Time spent waiting for the devices (0: not shared).
        onload_s: Time spent loading onto them after that.
        offload_s: Time spent freeing them at the end.
        resident_bytes: Memory the worker occupied on its devices at the end of its work.
        items_in: Items of the chunk.
        items_out: Outputs committed.
        tokens: Sum of `Worker.count_tokens` over the outputs (over the items for the last stage).
        emitted: When each output was committed, one time an output, ascending.
        idle_s: Of `seconds`, time in which it waited for others (`Worker.idle_s`).
        cpu_s: Processor seconds spent in `seconds` (`Worker.cpu_s`).
        devices: How many the worker computed on.
    """

    worker: str
    stage: str
    iteration: int
    input: str
    output: str
    start: float
    end: float
    seconds: float
    waited_s: float
    locked_s: float
    onload_s: float
    offload_s: float
    resident_bytes: int
    items_in: int
    items_out: int
    tokens: int
    emitted: tuple[float, ...]
    idle_s: float = 0.0
    cpu_s: float = 0.0
    devices: int = 0

    @property
    def group(self) -> str:
        """The worker's group."""
        return self.worker.rpartition("/")[0]

    @property
    def busy_s(self) -> float:
        """Time of work, and of passing on what it made: until the next chunk could be taken."""
        return max(self.seconds, self.end - self.start - self.offload_s)

    def parts(self) -> Iterator[tuple[str, float, float]]:
        """What it was spent on: kind ("stage": the work itself), start and seconds of each part
        that took any time, backwards from the work, the end last.
        """
        start = self.start
        yield "stage", start, self.seconds
        for kind, seconds in (
            ("onload", self.onload_s),
            ("wait for devices", self.locked_s),
            ("wait for items", self.waited_s),
        ):
            start -= seconds
            if seconds > 0:
                yield kind, start, seconds
        if self.offload_s > 0:
            yield "offload", self.start + self.seconds, self.offload_s


@dataclass(frozen=True, slots=True)
class StageReport:
    """The outcome of a stage call on one rank: the value of its Handle, one a rank.

    Attributes:
        values: What the function returned for each chunk, where there is no output channel.
        result: What the `finish` method of the stage returned; None without one.
        closed: It has closed its output channel.
    """

    worker: str
    stage: str
    iteration: int
    records: tuple[ChunkRecord, ...]
    values: tuple[Any, ...] = ()
    result: Any = None
    closed: bool = False

    @property
    def items(self) -> int:
        """Items taken."""
        return sum(record.items_in for record in self.records)

    @property
    def tokens(self) -> int:
        """Tokens handled."""
        return sum(record.tokens for record in self.records)

    @property
    def seconds(self) -> float:
        """Time of work, without waits."""
        return sum(record.seconds for record in self.records)

    @property
    def idle_s(self) -> float:
        """Of these, time in which it waited for others."""
        return sum(record.idle_s for record in self.records)


class RecordSink(Protocol):
    """Takes the records of a finished stage call; must not block."""

    def __call__(self, record: ChunkRecord, /) -> None:
        """Called once a chunk, on the thread that completes the call."""

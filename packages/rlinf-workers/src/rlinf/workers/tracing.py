"""What `rlinf-profiler --trace` records of a job: chunks of stages, and communication.

Every process writes a Chrome trace of its own into the folder it finds in its environment, as it
ends; without one nothing is recorded. The clock of all of them is `time.monotonic`.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.comm import ChromeTraceSink, Endpoint
from rlinf.sched.config import is_traced, trace_folder
from rlinf.workers.records import ChunkRecord, RecordSink

__all__ = ["StageTrace", "traced_communication", "traced_stages"]

TOLD = (
    "worker",
    "iteration",
    "devices",
    "input",
    "output",
    "waited_s",
    "locked_s",
    "onload_s",
    "offload_s",
)
"""What a span of work says of its record."""


class StageTrace:
    """A sink of chunk records that become spans: work, and what it waited for before and after."""

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []

    def __call__(self, record: ChunkRecord) -> None:
        """Keep one chunk."""
        shift = time.monotonic() - time.time()
        emitted = [time_ - record.start for time_ in record.emitted]
        args = {key: getattr(record, key) for key in TOLD}
        args |= {"items": record.items_in, "emitted": emitted}
        for kind, start, seconds in record.parts():
            self._add(record, kind, start + shift, seconds, args if kind == "stage" else {})

    def write(self, path: Path) -> None:
        """Write everything kept so far as one JSON file."""
        path.write_text(json.dumps({"traceEvents": self._rows}), encoding="utf-8")

    def _add(
        self, record: ChunkRecord, kind: str, start: float, seconds: float, args: dict[str, object]
    ) -> None:
        where = record.worker if kind == "stage" else f"{record.worker} ({kind})"
        self._rows.append(
            {
                "name": f"{record.group}.{record.stage}",
                "cat": kind,
                "ph": "X",
                "ts": start * 1e6,
                "dur": seconds * 1e6,
                "pid": "stages",
                "tid": where,
                "args": args,
            }
        )


@contextmanager
def traced_stages(sinks: list[RecordSink]) -> Iterator[None]:
    """Record all chunks until the end, if a trace is wanted; in the process of the controller."""
    folder = trace_folder()
    if folder is None or not is_traced("flow"):
        yield
        return
    found = StageTrace()
    sinks.append(found)
    try:
        yield
    finally:
        found.write(folder / f"stages-{os.getpid()}-{id(found):x}.json")


@contextmanager
def traced_communication(endpoint: Endpoint) -> Iterator[None]:
    """Record what an endpoint sends and receives until the end, if that is wanted."""
    folder = trace_folder()
    if folder is None or not is_traced("worker_communication"):
        yield
        return
    sink = ChromeTraceSink(str(endpoint.id))
    endpoint.add_sink(sink)
    try:
        yield
    finally:
        name = str(endpoint.id).replace("/", "-")
        sink.write(folder / f"comm-{name}-{os.getpid()}-{id(sink):x}.json")

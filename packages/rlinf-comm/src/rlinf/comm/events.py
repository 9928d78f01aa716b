"""What happened, as frozen data, for whoever wants to watch: `Endpoint.add_sink(sink)`.

A sink is called on the thread that dispatches (or sends); it must not block.
"""

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlinf.comm.address import WorkerId


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events: who it is about and when (seconds, `time.monotonic`)."""

    peer: WorkerId
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class Connected(Event):
    """A connection to this incarnation of the peer is up, over `transport`, and why that one."""

    transport: str
    because: str


@dataclass(frozen=True, slots=True)
class Disconnected(Event):
    """The connection was closed because nobody used it; the next send makes it again."""


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """This incarnation of the peer is gone: it closed (`clean`), died or was replaced."""

    reason: str
    clean: bool


@dataclass(frozen=True, slots=True)
class Closing(Event):
    """This endpoint (`peer` is its own id) is about to close and still works: the last chance to
    send what somebody holds back. The only event whose sinks may wait, for a short while.
    """


@dataclass(frozen=True, slots=True)
class Sent(Event):
    """A message, request or reply was handed to the transport."""

    what: str
    tag: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Received(Event):
    """A message, request or reply has arrived whole."""

    what: str
    tag: int
    nbytes: int


class Sink(Protocol):
    """Anything that takes events; called on the dispatching thread, must not block."""

    def __call__(self, event: Event) -> None:
        """Take one event."""


class ChromeTraceSink:
    """Collects events and writes a file that chrome://tracing and Perfetto open."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: list[dict[str, object]] = []

    def __call__(self, event: Event) -> None:
        """Keep one event as an instant row of the trace."""
        values = {name: getattr(event, name) for name in type(event).__slots__}
        self._rows.append(
            {
                "name": f"{type(event).__name__} {event.peer}",
                "ph": "i",
                "s": "t",
                "ts": event.at * 1e6,
                "pid": os.getpid(),
                "tid": threading.get_ident(),
                "args": {"epoch": event.epoch} | {key: str(value) for key, value in values.items()},
            }
        )

    def write(self, path: str | Path) -> None:
        """Write everything collected so far as one JSON file."""
        meta = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": self._name}}
        Path(path).write_text(json.dumps({"traceEvents": [meta, *self._rows]}))


def now() -> float:
    """The clock of all events: seconds, monotonic."""
    return time.monotonic()

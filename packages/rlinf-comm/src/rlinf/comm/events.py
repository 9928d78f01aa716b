"""What happened, as frozen data, for whoever wants to watch: `Endpoint.add_sink(sink)`.

A sink is called on the thread that dispatches (or sends); it must not block.
"""

import dataclasses
import json
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlinf.comm.address import WorkerId

SLICE_US = 1.0


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
    """Collects events and writes a file that Perfetto and chrome://tracing open.

    Messages are slices, joined by arrows from the sender's file to the receiver's; the rest are
    instants. Files of workers of one host share a clock and may be put together:
    `{"traceEvents": [*one["traceEvents"], *other["traceEvents"]]}`.

    Args:
        name: Of the worker, as others call it ("rollout/3"): arrows go by it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: list[dict[str, object]] = []
        self._counts: Counter[tuple[str, WorkerId, int]] = Counter()

    def __call__(self, event: Event) -> None:
        """Keep one event."""
        fields = {field: getattr(event, field) for field in _fields(type(event))}
        row: dict[str, object] = {
            "cat": "comm",
            "ts": event.at * 1e6,
            "pid": os.getpid(),
            "tid": threading.get_ident(),
        }
        args = {key: str(value) for key, value in fields.items()}
        if isinstance(event, (Sent, Received)):
            sent = isinstance(event, Sent)
            word = f"send {event.what} to" if sent else f"recv {event.what} from"
            self._rows.append(
                {"name": f"{word} {event.peer}", "ph": "X", "dur": SLICE_US, "args": args, **row}
            )
            if event.what == "message":
                self._rows.append({"name": "message", "id": self._arrow(event, sent), **row})
                self._rows[-1].update({"ph": "s"} if sent else {"ph": "f", "bp": "e"})
        else:
            name = f"{type(event).__name__} {event.peer}"
            self._rows.append({"name": name, "ph": "i", "s": "t", "args": args, **row})

    def write(self, path: str | Path) -> None:
        """Write everything collected so far as one JSON file."""
        meta = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": self._name}}
        Path(path).write_text(json.dumps({"traceEvents": [meta, *self._rows]}))

    def _arrow(self, event: "Sent | Received", sent: bool) -> str:
        """The same for both ends: order is kept between two workers, a tag at a time."""
        key = ("sent" if sent else "received", event.peer, event.tag)
        self._counts[key] += 1
        ends = (self._name, event.peer) if sent else (event.peer, self._name)
        return f"{ends[0]} {ends[1]} {event.tag} {self._counts[key]}"


def _fields(kind: type[Event]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def now() -> float:
    """The clock of all events: seconds, monotonic."""
    return time.monotonic()

"""Feeding a profile from a program: record what ran, get a profile and a trace."""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlinf.sched.config import trace_folder
from rlinf.sched.errors import ProfileError
from rlinf.sched.profile import ComponentProfile, Profile, Sample

CURVE_POINTS = 64
"""Points kept of an emission curve."""


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a component.

    Attributes:
        devices: it ran on.
        items: it worked through.
        start: seconds, on any clock that all records share.
        seconds: how long it took.
        emitted: seconds after the start at which items came out, increasing; empty: unknown.
        device_type: type of its devices.
    """

    component: str
    devices: int
    items: float
    start: float
    seconds: float
    emitted: tuple[float, ...] = ()
    device_type: str = ""


@dataclass(slots=True)
class Profiler:
    """Collects records; safe to use from several threads.

    .. code-block:: python

        profiler = Profiler()
        with profiler.span("rollout", devices=8, items=64) as emit:
            for sample in generate():
                emit()
        profile = profiler.profile()
    """

    _records: list[Record] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def records(self) -> tuple[Record, ...]:
        """Everything recorded so far."""
        with self._lock:
            return tuple(self._records)

    def record(self, record: Record) -> None:
        """Add a run measured elsewhere.

        Raises:
            ProfileError: a run without devices, items or time.
        """
        if record.devices < 1 or record.items <= 0 or record.seconds <= 0:
            raise ProfileError(record.component, f"needs devices, items and time: {record}")
        with self._lock:
            self._records.append(record)

    @contextmanager
    def span(self, component: str, devices: int, items: float) -> Iterator["Emit"]:
        """Measure a run; call what it gives once for every item that comes out, if known."""
        start = time.perf_counter()
        emit = Emit(start)
        yield emit
        seconds = time.perf_counter() - start
        self.record(Record(component, devices, items, start, seconds, tuple(emit.times)))

    def profile(self, *, skip: int = 0) -> Profile:
        """A profile of all records.

        Args:
            skip: the first so many runs of each component and size are warm-up.

        Raises:
            ProfileError: nothing was recorded.
        """
        by_component: dict[str, list[Record]] = {}
        for record in sorted(self.records, key=lambda r: r.start):
            by_component.setdefault(record.component, []).append(record)
        if not by_component:
            raise ProfileError("records", "nothing was recorded")
        return Profile({name: _summary(runs, skip) for name, runs in by_component.items()})

    def save_trace(self, path: str | Path | None = None) -> Path | None:
        """Write the records as a Chrome trace.

        Args:
            path: a file; None: a file of this process in the folder asked for by
                ``rlinf-profiler --trace``, and nothing where none was asked for.

        Returns:
            The file written.
        """
        if path is None:
            folder = trace_folder()
            if folder is None:
                return None
            path = folder / f"profiler-{os.getpid()}.json"
        events = [_event(record) for record in self.records]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        return Path(path)


@dataclass(slots=True)
class Emit:
    """Call it once for every item that comes out."""

    start: float
    times: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Note one item."""
        self.times.append(time.perf_counter() - self.start)


def _summary(runs: Sequence[Record], skip: int) -> ComponentProfile:
    seen: dict[tuple[int, float, str], int] = {}
    kept = []
    for run in runs:
        key = (run.devices, run.items, run.device_type)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > skip:
            kept.append(run)
    kept = kept or list(runs)
    samples = tuple(Sample(r.devices, r.items, r.seconds, r.device_type) for r in kept)
    curves: dict[int, list[Sequence[float]]] = {}
    for run in kept:
        if run.emitted:
            curves.setdefault(run.devices, []).append(run.emitted)
    emissions = tuple((n, _curve(found)) for n, found in sorted(curves.items()))
    return ComponentProfile(samples, emissions=emissions)


def _curve(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The mean emission of some runs, as fractions of the time of their last item."""
    shares = np.arange(1, CURVE_POINTS + 1) / CURVE_POINTS
    each = [
        np.interp(shares, np.arange(len(run) + 1) / len(run), np.r_[0.0, np.sort(run)])
        for run in runs
    ]
    mean = np.maximum.accumulate(np.mean(each, axis=0))
    return tuple(float(q) for q in mean / mean[-1])


def _event(record: Record) -> dict[str, object]:
    return {
        "name": record.component,
        "cat": "worker",
        "ph": "X",
        "ts": record.start * 1e6,
        "dur": record.seconds * 1e6,
        "pid": os.getpid(),
        "tid": record.component,
        "args": {
            "devices": record.devices,
            "items": record.items,
            "device_type": record.device_type,
            "emitted": [round(seconds, 6) for seconds in record.emitted],
        },
    }

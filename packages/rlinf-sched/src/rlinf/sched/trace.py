"""Reading Chrome traces that a program wrote, adding them up, and putting them into one file."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlinf.sched.errors import TraceError
from rlinf.sched.profiler import Profiler, Record


@dataclass(frozen=True, slots=True)
class Span:
    """One event.

    Attributes:
        name: what was done.
        kind: category; "" where the program gave none.
        where: process and thread, named where the program named them.
        start: seconds.
        seconds: 0 for an event without duration.
        nbytes: moved by it.
        devices: it ran on; 0 where unknown.
        items: it worked through; 0 where unknown.
        device_type: of those devices; "" where unknown.
        emitted: seconds after the start at which items came out; empty: unknown.
        process: that it happened in, as the program named it.
        worker: that did it; "" where unknown.
        arguments: all that the program said.
    """

    name: str
    kind: str
    where: str
    start: float
    seconds: float
    nbytes: int = 0
    devices: int = 0
    items: float = 0.0
    device_type: str = ""
    emitted: tuple[float, ...] = ()
    process: str = ""
    worker: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Total:
    """All events of one name.

    Attributes:
        seconds: summed over processes.
        share: of the wall time of the trace; above 1 where several ran at once.
    """

    name: str
    kind: str
    count: int
    seconds: float
    share: float
    nbytes: int


def load_trace(path: str | Path) -> tuple[Span, ...]:
    """Events of a trace file, or of all ``.json`` files in a folder, by start.

    Raises:
        TraceError: nothing there, or not a Chrome trace.
    """
    spans = [span for file in _files(path) for span in _spans(_read(file))]
    return tuple(sorted(spans, key=lambda span: span.start))


def save_perfetto(path: str | Path, target: str | Path) -> Path:
    """All that `load_trace` reads, in one gzipped file that Perfetto and chrome://tracing open.

    Raises:
        TraceError: nothing there, or not a Chrome trace.
    """
    processes: dict[str, int] = {}
    threads: dict[tuple[int, str], int] = {}
    rows: list[dict[str, object]] = []
    for file in _files(path):
        events = _read(file)
        names = _names(events)
        for event in events:
            if event.get("name") in ("process_name", "thread_name"):
                continue
            pid, tid = event.get("pid", ""), str(event.get("tid", ""))
            process = processes.setdefault(names.get(pid) or str(pid), len(processes) + 1)
            thread = threads.setdefault((process, tid), len(threads) + 1)
            rows.append({**event, "pid": process, "tid": thread})
    for name, number in processes.items():
        about = {"name": name}
        rows.append({"name": "process_name", "ph": "M", "pid": number, "args": about})
    for (process, name), number in threads.items():
        row = {"name": "thread_name", "ph": "M", "pid": process, "tid": number}
        rows.append({**row, "args": {"name": name}})
    with gzip.open(target, "wt", encoding="utf-8") as out:
        json.dump({"traceEvents": rows}, out)
    return Path(target)


def totals(spans: Sequence[Span]) -> tuple[Total, ...]:
    """Time by name, the longest first."""
    wall = wall_s(spans)
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.name, span.kind), []).append(span)
    found = []
    for (name, kind), members in groups.items():
        seconds = sum(span.seconds for span in members)
        moved = sum(span.nbytes for span in members)
        share = seconds / wall if wall else 0.0
        found.append(Total(name, kind, len(members), seconds, share, moved))
    return tuple(sorted(found, key=lambda total: (-total.seconds, -total.nbytes, total.name)))


def wall_s(spans: Sequence[Span]) -> float:
    """Seconds from the first event to the last."""
    if not spans:
        return 0.0
    return max(s.start + s.seconds for s in spans) - min(s.start for s in spans)


def busy(spans: Sequence[Span]) -> dict[str, float]:
    """Share of the wall time in which each process and thread did anything recorded."""
    wall = wall_s(spans)
    found: dict[str, float] = {}
    for where in dict.fromkeys(span.where for span in spans):
        intervals = sorted(
            (s.start, s.start + s.seconds) for s in spans if s.where == where and s.seconds
        )
        found[where] = _covered(intervals) / wall if wall else 0.0
    return found


def profiler_of(spans: Sequence[Span]) -> Profiler:
    """A profiler fed with the spans that say how many devices and items they had."""
    profiler = Profiler()
    for span in spans:
        if span.devices and span.items and span.seconds:
            run = (span.name, span.devices, span.items, span.start, span.seconds)
            profiler.record(Record(*run, span.emitted, span.device_type))
    return profiler


def _files(path: str | Path) -> list[Path]:
    target = Path(path)
    files = sorted(target.glob("*.json")) if target.is_dir() else [target]
    if not files:
        raise TraceError(f"{target} holds no trace files; the program wrote none")
    return files


def _read(file: Path) -> list[Mapping[str, object]]:
    """The events of a file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise TraceError(f"{file} cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise TraceError(f"{file} is not JSON: {problem}") from problem
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list) or not all(isinstance(event, Mapping) for event in events):
        raise TraceError(f"{file} is not a Chrome trace: expected a list of events")
    return events


def _names(events: Iterable[Mapping[str, object]]) -> dict[object, str]:
    """Names of processes, by their numbers."""
    return {
        event.get("pid"): str(_mapping(event, "args").get("name", ""))
        for event in events
        if event.get("name") == "process_name"
    }


def _spans(events: Sequence[Mapping[str, object]]) -> Iterable[Span]:
    names = _names(events)
    for event in events:
        if event.get("ph") in ("X", "i", "I"):
            yield _span(event, names)


def _span(event: Mapping[str, object], names: Mapping[object, str]) -> Span:
    arguments = _mapping(event, "args")
    pid = event.get("pid", "")
    process = names.get(pid) or str(pid)
    return Span(
        name=str(event.get("name", "")),
        kind=str(event.get("cat", "")),
        where=f"{process}/{event.get('tid', '')}",
        start=_number(event, "ts") / 1e6,
        seconds=_number(event, "dur") / 1e6,
        nbytes=int(_number(arguments, "nbytes") or _number(arguments, "bytes")),
        devices=int(_number(arguments, "devices")),
        items=_number(arguments, "items"),
        device_type=str(arguments.get("device_type", "")),
        emitted=_numbers(arguments, "emitted"),
        process=process,
        worker=str(arguments.get("worker", "")),
        arguments=arguments,
    )


def _mapping(event: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = event.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(event: Mapping[str, object], key: str) -> float:
    value = event.get(key, 0)
    try:
        return float(value) if isinstance(value, str | int | float) else 0.0
    except ValueError:
        return 0.0


def _numbers(event: Mapping[str, object], key: str) -> tuple[float, ...]:
    value = event.get(key)
    if not isinstance(value, list) or not all(isinstance(n, int | float) for n in value):
        return ()
    return tuple(float(n) for n in value)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in intervals:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

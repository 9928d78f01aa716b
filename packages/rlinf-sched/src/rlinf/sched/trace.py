"""Reading Chrome traces that a program wrote, and saying where its time went."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.sched.errors import TraceError
from rlinf.sched.profiler import Profiler, Record

SHOWN = 0.0005
"""Shares of the time below this are left out of a report."""


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
    target = Path(path)
    files = sorted(target.glob("*.json")) if target.is_dir() else [target]
    if not files:
        raise TraceError(f"{target} holds no trace files; the program wrote none")
    spans = [span for file in files for span in _read(file)]
    return tuple(sorted(spans, key=lambda span: span.start))


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


def report(spans: Sequence[Span], rows: int = 20) -> str:
    """Where the time went, for a person to read."""
    wall = wall_s(spans)
    lines = [f"{len(spans)} events over {wall:.3f} s", ""]
    lines.append(f"{'what':40s} {'count':>7s} {'seconds':>9s} {'of wall':>8s} {'MB':>9s}")
    for total in totals(spans)[:rows]:
        label = f"{total.kind}: {total.name}" if total.kind else total.name
        lines.append(
            f"{label[:40]:40s} {total.count:7d} {total.seconds:9.3f} "
            f"{100 * total.share:7.1f}% {total.nbytes / 1e6:9.2f}"
        )
    lines += ["", "busy:"]
    shares = sorted(busy(spans).items(), key=lambda item: -item[1])
    shown = [(where, share) for where, share in shares if share >= SHOWN][:rows]
    lines += [f"  {where:38s} {100 * share:5.1f} %" for where, share in shown]
    return "\n".join(lines)


def profiler_of(spans: Sequence[Span]) -> Profiler:
    """A profiler fed with the spans that say how many devices and items they had."""
    profiler = Profiler()
    for span in spans:
        if span.devices and span.items and span.seconds:
            run = (span.name, span.devices, span.items, span.start, span.seconds)
            profiler.record(Record(*run, span.emitted, span.device_type))
    return profiler


def _read(file: Path) -> Iterable[Span]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise TraceError(f"{file} cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise TraceError(f"{file} is not JSON: {problem}") from problem
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list) or not all(isinstance(event, Mapping) for event in events):
        raise TraceError(f"{file} is not a Chrome trace: expected a list of events")
    names = {
        event.get("pid"): str(_mapping(event, "args").get("name", ""))
        for event in events
        if event.get("name") == "process_name"
    }
    for event in events:
        if event.get("ph") in ("X", "i", "I"):
            yield _span(event, names)


def _span(event: Mapping[str, object], names: Mapping[object, str]) -> Span:
    arguments = _mapping(event, "args")
    pid = event.get("pid", "")
    return Span(
        name=str(event.get("name", "")),
        kind=str(event.get("cat", "")),
        where=f"{names.get(pid) or pid}/{event.get('tid', '')}",
        start=_number(event, "ts") / 1e6,
        seconds=_number(event, "dur") / 1e6,
        nbytes=int(_number(arguments, "nbytes") or _number(arguments, "bytes")),
        devices=int(_number(arguments, "devices")),
        items=_number(arguments, "items"),
        device_type=str(arguments.get("device_type", "")),
        emitted=_numbers(arguments, "emitted"),
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

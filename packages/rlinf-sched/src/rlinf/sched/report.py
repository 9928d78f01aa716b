"""Where the time of a trace went, and what two traces differ in, for a person to read."""

import statistics
from collections.abc import Mapping, Sequence

from rlinf.sched.activities import activities, iterations_s, length_s, shares
from rlinf.sched.improvements import improvement_lines
from rlinf.sched.trace import Span, busy, totals, wall_s
from rlinf.sched.traffic import traffic

SHOWN = 0.0005
"""Shares of the time below this are left out of a report."""
MB = 1e6
SMALLEST = 0.001
"""Figures below this are left out of a comparison."""


def report(spans: Sequence[Span], rows: int = 20) -> str:
    """Totals, then the flow, the messages and what would help, as far as they were traced."""
    parts = [_totals(spans, rows), _flow(spans) or _busy(spans, rows), _traffic(spans, rows)]
    parts.append(improvement_lines(activities(spans)))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _totals(spans: Sequence[Span], rows: int) -> list[str]:
    events = "1 event" if len(spans) == 1 else f"{len(spans)} events"
    lines = [f"{events} over {wall_s(spans):.3f} s", ""]
    lines.append(f"{'what':40s} {'count':>7s} {'seconds':>9s} {'of wall':>8s} {'MB':>9s}")
    for total in totals(spans)[:rows]:
        label = f"{total.kind}: {total.name}" if total.kind else total.name
        lines.append(
            f"{label[:40]:40s} {total.count:7d} {total.seconds:9.3f} "
            f"{100 * total.share:7.1f}% {total.nbytes / 1e6:9.2f}"
        )
    return lines


def _busy(spans: Sequence[Span], rows: int) -> list[str]:
    ordered = sorted(busy(spans).items(), key=lambda item: -item[1])
    shown = [(where, share) for where, share in ordered if share >= SHOWN][:rows]
    return ["busy:", *(f"  {where:38s} {100 * share:5.1f} %" for where, share in shown)]


def _flow(spans: Sequence[Span]) -> list[str]:
    found = activities(spans)
    if not found:
        return []
    rounds = iterations_s(found)
    lines = [
        f"{len(rounds)} iterations, the middle one {statistics.median(rounds):.3f} s, "
        f"in {length_s(found):.2f} s; of that",
        f"{'worker':24s} {'works':>8s} {'loads':>8s} {'for devices':>12s} {'for items':>10s}"
        f" {'idle':>8s}",
    ]
    listed = shares(found)
    lines += [
        f"{one.worker[:24]:24s} {_percent(one.works):>8s} {_percent(one.loads):>8s} "
        f"{_percent(one.waits_for_devices):>12s} {_percent(one.waits_for_items):>10s} "
        f"{_percent(one.idle):>8s}"
        for one in listed
    ]
    mean = statistics.fmean(one.idle for one in listed)
    return [*lines, f"{'all workers':24s} {_percent(mean):>50s}"]


def _traffic(spans: Sequence[Span], rows: int) -> list[str]:
    listed = [one for one in traffic(spans) if one.nbytes >= MB / 100]
    if not listed:
        return []
    lines = [f"{'from':24s} {'to':24s} {'over':8s} {'messages':>9s} {'MB':>9s}"]
    return lines + [
        f"{one.sender[:24]:24s} {one.receiver[:24]:24s} {one.transport:8s} {one.messages:9d} "
        f"{one.nbytes / 1e6:9.2f}"
        for one in listed[:rows]
    ]


def figures(spans: Sequence[Span]) -> dict[str, float]:
    """What can be compared, by name with its unit: of a flow an iteration, else of the whole."""
    found = activities(spans)
    if not found:
        return {"wall, s": wall_s(spans)} | {
            f"{total.name}, s": total.seconds for total in totals(spans) if total.seconds
        }
    rounds = len(iterations_s(found))
    result = {"iteration, s": statistics.median(iterations_s(found))}
    for name in dict.fromkeys(one.name for one in found):
        of = [one for one in found if one.name == name]
        for what, seconds in (
            ("works", [one.work_s for one in of]),
            ("loads", [one.load_s for one in of]),
            ("waits for devices", [one.locked_s for one in of]),
            ("waits for items", [one.waited_s for one in of]),
        ):
            if any(seconds):
                result[f"{name} {what}, s"] = sum(seconds) / rounds
    result["idle, %"] = 100 * statistics.fmean(one.idle for one in shares(found))
    for pair in traffic(spans):
        name = f"{pair.sender} to {pair.receiver}, MB"
        result[name] = result.get(name, 0.0) + pair.nbytes / 1e6 / rounds
    return result


def comparison(before: Mapping[str, float], after: Mapping[str, float], rows: int = 30) -> str:
    """What differs between the `figures` of two traces, the largest difference of a unit first."""
    names = [*before, *(name for name in after if name not in before)]
    head, *rest = names
    rest.sort(key=lambda name: -abs(after.get(name, 0.0) - before.get(name, 0.0)))
    by_unit = sorted(rest, key=lambda name: ("s", "%", "MB").index(name.rpartition(", ")[2]))
    shown = [n for n in by_unit if max(before.get(n, 0.0), after.get(n, 0.0)) >= SMALLEST]
    lines = [f"{'':48s} {'before':>10s} {'after':>10s} {'change':>10s} {'':>8s}"]
    for name in [head, *shown][:rows]:
        old, new = before.get(name, 0.0), after.get(name, 0.0)
        times = f"{new / old:.2f} x" if old and new else ""
        lines.append(f"{name[:48]:48s} {old:10.3f} {new:10.3f} {new - old:+10.3f} {times:>8s}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

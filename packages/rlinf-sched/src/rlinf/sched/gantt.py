"""A plan drawn in time: PNG (matplotlib, extra ``plot``), one HTML page, Chrome trace."""

import html
import json
from dataclasses import dataclass
from pathlib import Path

from rlinf.sched.errors import SchedError
from rlinf.sched.evaluate import Timeline
from rlinf.sched.graph import cycle_name
from rlinf.sched.plan import Plan
from rlinf.sched.tree import Leaf, Loop, Tree, leaves, width

COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#8172b2", "#ccb974", "#64b5cd", "#937860", "#da8bc3")
SWITCH_COLOUR = "#999999"
WIDTH, HEIGHT = 1000, 320


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle in the picture.

    Attributes:
        name: component, or "switch".
        first: its first device.
        count: how many devices.
        start: seconds.
        end: seconds.
        part: which micro-batch.
    """

    name: str
    first: int
    count: int
    start: float
    end: float
    part: int = 0


def bars(plan: Plan, line: Timeline) -> list[Bar]:
    """Everything that happens, by component and micro-batch."""
    where = {device: k for k, device in enumerate(plan.devices)}
    found = []
    spots = plan.placements()
    for tree in _components(plan.root):
        members = (
            [tree.component] if isinstance(tree, Leaf) else [m.component for m in tree.members]
        )
        run = line.runs[cycle_name(members)]
        for member in members:
            devices = spots[member].devices
            found += [
                Bar(member, where[devices[0]], len(devices), float(start), float(end), k)
                for k, (start, end) in enumerate(zip(run.start, run.finish, strict=True))
            ]
    for start, end, pair in line.switches:
        count = sum(width(pair).values())
        name = next(leaves(pair)).component
        found.append(Bar("switch", where[spots[name].devices[0]], count, start, end))
    return found


def save_chrome_trace(plan: Plan, line: Timeline, path: str | Path) -> None:
    """Write a JSON file for chrome://tracing or Perfetto: one row a group of devices."""
    events = [
        {
            "name": bar.name,
            "cat": "plan",
            "ph": "X",
            "ts": bar.start * 1e6,
            "dur": (bar.end - bar.start) * 1e6,
            "pid": "plan",
            "tid": f"{plan.devices[bar.first]} (+{bar.count - 1})",
            "args": {"micro_batch": bar.part, "devices": bar.count},
        }
        for bar in bars(plan, line)
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def save_html(plan: Plan, line: Timeline, path: str | Path) -> None:
    """Write one page that needs nothing else: an SVG picture and the plan as text."""
    total, devices = line.seconds or 1.0, len(plan.devices)
    colours = _colours(plan)
    rows = []
    for bar in bars(plan, line):
        x, w = WIDTH * bar.start / total, WIDTH * (bar.end - bar.start) / total
        y, h = HEIGHT * bar.first / devices, HEIGHT * bar.count / devices
        label = html.escape(f"{bar.name} {bar.part}: {bar.start:.2f} to {bar.end:.2f} s")
        rows.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" '
            f'fill="{colours[bar.name]}" stroke="white" stroke-width=".3">'
            f"<title>{label}</title></rect>"
        )
    legend = " ".join(
        f'<span style="color:{colour}">&#9632; {html.escape(name)}</span>'
        for name, colour in colours.items()
    )
    page = (
        '<!doctype html><meta charset="utf-8"><title>Plan</title>'
        f'<body style="font-family:sans-serif"><p>{legend}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%">{"".join(rows)}</svg>'
        f"<pre>{html.escape(plan.tree())}</pre></body>"
    )
    Path(path).write_text(page, encoding="utf-8")


def save_png(plan: Plan, line: Timeline, path: str | Path) -> None:
    """Write a picture; needs matplotlib.

    Raises:
        SchedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SchedError("PNG needs matplotlib: pip install 'rlinf-sched[plot]'") from problem
    colours = _colours(plan)
    figure = Figure(figsize=(10, 3.2))
    axes = figure.subplots()
    for bar in bars(plan, line):
        axes.broken_barh(
            [(bar.start, bar.end - bar.start)],
            (bar.first, bar.count),
            facecolors=colours[bar.name],
            edgecolors="white",
            linewidth=0.2,
        )
    for name, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=6, label=name)
    axes.set_xlim(0, line.seconds)
    axes.set_ylim(0, len(plan.devices))
    axes.set_xlabel("seconds")
    axes.set_ylabel("device")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=6, frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _components(tree: Tree) -> list[Leaf | Loop]:
    if isinstance(tree, Leaf | Loop):
        return [tree]
    return [*_components(tree.first), *_components(tree.second)]


def _colours(plan: Plan) -> dict[str, str]:
    names = plan.placements()
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}
    return {**colours, "switch": SWITCH_COLOUR}

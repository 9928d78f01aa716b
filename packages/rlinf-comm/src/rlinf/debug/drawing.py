"""A connection graph drawn: as text, for Graphviz, and as a picture (SVG or PNG)."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Final, Literal, NamedTuple, overload

from rlinf.comm.registry import WorkerRecord
from rlinf.debug.graph import Connection, ConnectionGraph

COLOURS: Final = {
    "inproc": "#7f7f7f",
    "shm": "#2ca02c",
    "tcp": "#1f77b4",
    "streams": "#8c564b",
    "gloo": "#17becf",
    "nccl": "#d62728",
    "cuda_ipc": "#ff7f0e",
}
OTHER: Final = "#9467bd"
SILENT: Final = "#d62728"
WIDTH, HEIGHT, GAP, MARGIN = 170, 46, 34, 30
COLUMN: Final = 520
WORDS, LINE = 150, 12


@overload
def visualize_connection_graph(
    graph: ConnectionGraph, form: Literal["png"], path: str | Path | None = None
) -> bytes: ...


@overload
def visualize_connection_graph(
    graph: ConnectionGraph,
    form: Literal["text", "dot", "svg"] = "text",
    path: str | Path | None = None,
) -> str: ...


@overload
def visualize_connection_graph(
    graph: ConnectionGraph, form: str, path: str | Path | None = None
) -> str | bytes: ...


def visualize_connection_graph(
    graph: ConnectionGraph, form: str = "text", path: str | Path | None = None
) -> str | bytes:
    """Draw a graph: "text" for a terminal, "dot" for Graphviz, "svg" or "png" for the eye.

    PNG needs matplotlib (`pip install rlinf-comm[plot]`), and is bytes.

    Args:
        graph: What to draw.
        form: One of these.
        path: A file to write it to as well.

    Raises:
        ValueError: The form is none of them.
        ImportError: matplotlib is not there.
    """
    draw = FORMS.get(form)
    if draw is None:
        raise ValueError(f"form {form!r} must be one of {', '.join(FORMS)}")
    drawn = draw(graph)
    if path is not None:
        Path(path).write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())
    return drawn


def said(edge: Connection) -> str:
    """A connection in a few words: what carries it, how much, how fast."""
    parts = [edge.transport or "-", _bytes(edge.nbytes)]
    if edge.latency_s is not None:
        parts.append(f"{1e3 * edge.latency_s:.2f} ms")
    if edge.state != "up":
        parts.append(edge.state)
    if edge.waiting:
        parts.append(f"{edge.waiting} waiting")
    return ", ".join(parts)


def _bytes(count: int) -> str:
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _text(graph: ConnectionGraph) -> str:
    lines = []
    silent = dict(graph.silent)
    for number, host in enumerate(hosts_of(graph)):
        lines.append(f"host {number}")
        for worker in graph.workers:
            if worker.host != host:
                continue
            note = f"  silent: {silent[worker.id]}" if worker.id in silent else ""
            lines.append(f"  {worker.id}  [{worker.device}, pid {worker.pid}]{note}")
            for edge in graph.connections:
                if worker.id in (edge.one, edge.other):
                    other = edge.other if edge.one == worker.id else edge.one
                    lines.append(f"    -- {other}: {said(edge)}  ({edge.because})")
    return "\n".join(lines)


def _dot(graph: ConnectionGraph) -> str:
    lines = ["graph connections {", "  node [shape=box];"]
    for number, host in enumerate(hosts_of(graph)):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f'    label="host {number}";')
        lines += [
            f'    "{worker.id}" [label="{worker.id}\\n{worker.device}, pid {worker.pid}"];'
            for worker in graph.workers
            if worker.host == host
        ]
        lines.append("  }")
    for edge in graph.connections:
        style = "solid" if edge.state == "up" else "dashed"
        because = edge.because.replace('"', "'")
        lines.append(
            f'  "{edge.one}" -- "{edge.other}" [label="{said(edge)}", tooltip="{because}", '
            f'color="{COLOURS.get(edge.transport, OTHER)}", style={style}];'
        )
    return "\n".join([*lines, "}"])


def _svg(graph: ConnectionGraph) -> str:
    """A column a host, workers below each other, connections as arcs at their right.

    Without a ground, and in the colour of the text around it: for light and dark pages.
    """
    hosts, places = hosts_of(graph), place(graph)
    width, height = size_of(graph)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" '
        'fill="currentColor">',
    ]
    for number in range(len(hosts)):
        left = MARGIN / 2 + number * COLUMN
        parts.append(
            f'<rect x="{left}" y="{MARGIN / 2}" width="{COLUMN - MARGIN / 2}" '
            f'height="{height - MARGIN}" rx="8" fill-opacity="0.04" stroke="currentColor" '
            f'stroke-opacity="0.25"/>'
            f'<text x="{left + 12}" y="{MARGIN / 2 + 20}" fill-opacity="0.7">host {number}</text>'
        )
    taken: Taken = []
    parts += [_line(edge, places, taken) for edge in graph.connections]
    silent = dict(graph.silent)
    parts += [_box(worker, places, worker.id in silent) for worker in graph.workers]
    return "\n".join([*parts, "</svg>"])


def size_of(graph: ConnectionGraph) -> tuple[int, int]:
    """Width and height of the picture."""
    hosts = hosts_of(graph)
    rows = max([sum(w.host == host for w in graph.workers) for host in hosts], default=0)
    return MARGIN + COLUMN * max(1, len(hosts)), 2 * MARGIN + 30 + rows * (HEIGHT + GAP)


def place(graph: ConnectionGraph) -> dict[str, tuple[int, int]]:
    """The left upper corner of each worker's box."""
    columns = {host: number for number, host in enumerate(hosts_of(graph))}
    rows = dict.fromkeys(columns, 0)
    places = {}
    for worker in graph.workers:
        row, rows[worker.host] = rows[worker.host], rows[worker.host] + 1
        left = MARGIN + columns[worker.host] * COLUMN
        places[str(worker.id)] = (left, MARGIN + 30 + row * (HEIGHT + GAP))
    return places


def _box(worker: WorkerRecord, places: dict[str, tuple[int, int]], silent: bool) -> str:
    x, y = places[str(worker.id)]
    note = " silent" if silent else ""
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        f'fill="{SILENT if silent else "none"}" fill-opacity="0.2" stroke="currentColor"/>'
        f'<text x="{x + 10}" y="{y + 19}" font-weight="bold">{escape(str(worker.id))}</text>'
        f'<text x="{x + 10}" y="{y + 36}" fill-opacity="0.7">'
        f"{escape(str(worker.device))}, pid {worker.pid}{note}</text>"
    )


class Route(NamedTuple):
    """Where a connection is drawn.

    Attributes:
        points: Two: a straight line. Four: a cubic curve.
        words: Where its words begin.
    """

    points: tuple[tuple[float, float], ...]
    words: tuple[float, float]


Taken = list[tuple[float, float]]


def route(edge: Connection, places: dict[str, tuple[int, int]], taken: Taken) -> Route | None:
    """An arc whose width grows with the distance; its words go where no others are `taken`."""
    if str(edge.one) not in places or str(edge.other) not in places:
        return None
    (x1, y1), (x2, y2) = places[str(edge.one)], places[str(edge.other)]
    start, end = y1 + HEIGHT / 2, y2 + HEIGHT / 2
    if x1 == x2:
        bulge = 20 + 34 * abs(y2 - y1) / (HEIGHT + GAP)
        x = x1 + WIDTH
        points = ((x, start + 6), (x + bulge, start + 6), (x + bulge, end - 6), (x, end - 6))
        return Route(points, _free((x + 0.75 * bulge + 6, (start + end) / 2 + 4), taken))
    if x1 > x2:
        (x1, start), (x2, end) = (x2, end), (x1, start)
    slope = (end - start) / (x2 - x1 - WIDTH)
    return Route(((x1 + WIDTH, start), (x2, end)), _free((x2 - 130, end - slope * 130 - 6), taken))


def _free(at: tuple[float, float], taken: Taken) -> tuple[float, float]:
    """The next place below where words do not cover others."""
    x, y = at
    while any(abs(x - other_x) < WORDS and abs(y - other_y) < LINE for other_x, other_y in taken):
        y += LINE
    taken.append((x, y))
    return x, y


def _line(edge: Connection, places: dict[str, tuple[int, int]], taken: Taken) -> str:
    found = route(edge, places, taken)
    if found is None:
        return ""
    colour = COLOURS.get(edge.transport, OTHER)
    dashes = "" if edge.state == "up" else ' stroke-dasharray="5 4"'
    first, *rest = (f"{x},{y}" for x, y in found.points)
    path = f"M{first} {'C' if len(rest) > 1 else 'L'}{' '.join(rest)}"
    x, y = found.words
    return (
        f'<g><title>{escape(edge.because)}</title><path d="{path}" fill="none" '
        f'stroke="{colour}" stroke-width="2"{dashes}/>'
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="11">'
        f"{escape(said(edge))}</text></g>"
    )


def hosts_of(graph: ConnectionGraph) -> list[str]:
    """Hosts, in the order of their columns."""
    return sorted({worker.host for worker in graph.workers})


def _png(graph: ConnectionGraph) -> bytes:
    from rlinf.debug.picture import png

    return png(graph)


FORMS: Final[dict[str, Callable[[ConnectionGraph], str | bytes]]] = {
    "text": _text,
    "dot": _dot,
    "svg": _svg,
    "png": _png,
}

"""A connection graph as a PNG picture, by matplotlib; laid out as in the SVG."""

import io

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from rlinf.debug.drawing import (
    COLOURS,
    COLUMN,
    HEIGHT,
    MARGIN,
    OTHER,
    SILENT,
    WIDTH,
    Taken,
    hosts_of,
    place,
    route,
    said,
    size_of,
)
from rlinf.debug.graph import Connection, ConnectionGraph

DOTS = 100
CUBIC = (Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4)
STRAIGHT = (Path.MOVETO, Path.LINETO)


def png(graph: ConnectionGraph) -> bytes:
    """The file's content; black on white."""
    width, height = size_of(graph)
    places, silent = place(graph), {worker for worker, _ in graph.silent}
    figure = Figure(figsize=(width / DOTS, height / DOTS), dpi=2 * DOTS)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for number in range(len(hosts_of(graph))):
        left = MARGIN / 2 + number * COLUMN
        _box(axes, (left, MARGIN / 2), (COLUMN - MARGIN / 2, height - MARGIN), "#f6f6f6")
        axes.text(left + 12, MARGIN / 2 + 20, f"host {number}", color="#555555", size=9)
    taken: Taken = []
    for edge in graph.connections:
        _line(axes, edge, places, taken)
    for worker in graph.workers:
        x, y = places[str(worker.id)]
        is_silent = worker.id in silent
        _box(axes, (x, y), (WIDTH, HEIGHT), f"{SILENT}33" if is_silent else "white")
        axes.text(x + 10, y + 19, str(worker.id), weight="bold", size=9)
        what = f"{worker.device}, pid {worker.pid}{' silent' if is_silent else ''}"
        axes.text(x + 10, y + 36, what, color="#555555", size=9)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()


def _box(axes: Axes, at: tuple[float, float], size: tuple[float, float], fill: str) -> None:
    style = "round,pad=0,rounding_size=6"
    axes.add_patch(FancyBboxPatch(at, *size, boxstyle=style, facecolor=fill, edgecolor="#888888"))


def _line(axes: Axes, edge: Connection, places: dict[str, tuple[int, int]], taken: Taken) -> None:
    found = route(edge, places, taken)
    if found is None:
        return
    colour = COLOURS.get(edge.transport, OTHER)
    path = Path(found.points, CUBIC if len(found.points) > 2 else STRAIGHT)
    dashes = "-" if edge.state == "up" else "--"
    axes.add_patch(PathPatch(path, fill=False, edgecolor=colour, linewidth=1.5, linestyle=dashes))
    ground = {"facecolor": "#f6f6f6", "edgecolor": "none", "pad": 1, "alpha": 0.8}
    axes.text(*found.words, said(edge), color=colour, size=8, bbox=ground)

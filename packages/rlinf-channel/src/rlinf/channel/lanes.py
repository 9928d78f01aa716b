"""What each worker did in the last iterations, as a line of text for each: pure."""

from collections.abc import Sequence

from rlinf.channel.life import WORK, Span
from rlinf.channel.terminal import Cell, Line

ITERATIONS, COLUMNS = 3, 72
LOOKS = {
    WORK: Cell("█", "cyan"),
    "onload": Cell("▄", "green"),
    "offload": Cell("▄", "green"),
    "wait for devices": Cell("░", "yellow"),
    "wait for items": Cell("·", "dim"),
}
"""Kind of a span -> its sign; the first of these that covers most of a column is shown."""


def lanes(spans: Sequence[Span], iterations: int = ITERATIONS) -> list[Line]:
    """A title, and a lane of `COLUMNS` signs for every worker with spans; nothing without spans."""
    if not spans:
        return []
    last = max(span.iteration for span in spans)
    shown = [span for span in spans if span.iteration > last - iterations]
    begin = min(span.start for span in shown if span.kind == WORK)
    width_s = (max(span.end for span in shown) - begin) / COLUMNS
    first = min(span.iteration for span in shown)
    lines: list[Line] = [
        [
            Cell(f"Timeline: iterations {first} to {last} in {width_s * COLUMNS:.2f} s  ", "bold"),
            *(Cell(f"{LOOKS[kind].text} {kind}  ", LOOKS[kind].style) for kind in (WORK, *WAITS)),
        ]
    ]
    for worker in dict.fromkeys(span.worker for span in shown):
        mine = [span for span in shown if span.worker == worker]
        signs = [
            _sign(mine, begin + n * width_s, begin + (n + 1) * width_s) for n in range(COLUMNS)
        ]
        lines.append([Cell(f"{worker:16.16} "), *signs])
    return lines


WAITS = ("wait for devices", "wait for items", "onload")


def _sign(spans: Sequence[Span], start: float, end: float) -> Cell:
    """What the time between was spent on most."""
    spent = dict.fromkeys(LOOKS, 0.0)
    for span in spans:
        if span.kind in spent:
            spent[span.kind] += max(0.0, min(end, span.end) - max(start, span.start))
    kind = max(spent, key=lambda kind: spent[kind])
    return LOOKS[kind] if spent[kind] > 0 else Cell(" ")

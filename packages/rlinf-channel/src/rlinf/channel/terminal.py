"""Text with colours in columns, and a place on the terminal where it is shown again and again.

Made by hand: a picture a second must cost next to nothing, and a library for it takes 20 times as
long.
"""

import shutil
from collections.abc import Iterable, Sequence
from html import escape
from types import TracebackType
from typing import NamedTuple, TextIO

GAP = 2
CELL_W, CELL_H = 8.4, 18
PAPER, INK = "#1c1f24", "#d8dee4"
INKS = {
    "cyan": "#39c5cf",
    "dim": "#7d8590",
    "green": "#57ab5a",
    "red": "#f47067",
    "yellow": "#c69026",
}
CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


class Cell(NamedTuple):
    """A piece of a line in one style: a key of `CODES`, or "" for none."""

    text: str
    style: str = ""


Line = Sequence[Cell]


def table(title: str, columns: str, rows: Iterable[Sequence[str | Sequence[Cell]]]) -> list[Line]:
    """Lines of a table below its title.

    Args:
        title: In bold.
        columns: Names, separated by `|`; a `>` before one aligns its column to the right.
        rows: A text or pieces for each column.
    """
    names = [name.removeprefix(">") for name in columns.split("|")]
    right = [name.startswith(">") for name in columns.split("|")]
    whole: list[list[Sequence[Cell]]] = [[[Cell(name, "dim")] for name in names]]
    whole += [[[Cell(one)] if isinstance(one, str) else one for one in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*whole, strict=True)]
    lines: list[Line] = [[Cell(title, "bold")]]
    for row in whole:
        line: list[Cell] = []
        for cells, width, to_right in zip(row, widths, right, strict=True):
            room = Cell(" " * (width - _width(cells)))
            line += (room, *cells) if to_right else (*cells, room)
            line.append(Cell(" " * GAP))
        lines.append(line)
    return lines


def paint(lines: Iterable[Line], width: int, *, colours: bool) -> list[str]:
    """Lines of text of at most that width. Whatever would not be printed becomes a `?`."""
    return ["".join(_line(line, width, colours)).rstrip() for line in lines]


def _line(line: Line, width: int, colours: bool) -> Iterable[str]:
    for text, style in line:
        shown = text[:width] if text.isprintable() else _printable(text[:width])
        width -= len(shown)
        yield f"\x1b[{CODES[style]}m{shown}\x1b[0m" if style and colours and shown else shown


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _width(cells: Sequence[Cell]) -> int:
    return sum([len(cell.text) for cell in cells])


def svg(lines: Sequence[Line], columns: int) -> str:
    """The lines as a picture of so many columns, for a page."""
    width, height = round((columns + 4) * CELL_W), (len(lines) + 2) * CELL_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        f'<g font-family="monospace" font-size="{CELL_H - 4}" xml:space="preserve" '
        'style="white-space:pre">',
    ]
    for row, line in enumerate(lines, start=2):
        at = 2
        for text, style in line:
            shown = escape(_printable(text[: max(0, columns + 2 - at)]))
            if shown.strip():
                long = len(text) * CELL_W
                look = f'fill="{INKS.get(style, INK)}"' + ' font-weight="bold"' * (style == "bold")
                place = f'x="{at * CELL_W:.1f}" y="{row * CELL_H - 4}" textLength="{long:.1f}"'
                parts.append(f"<text {place} {look}>{shown}</text>")
            at += len(text)
    return "\n".join([*parts, "</g>", "</svg>", ""])


class Screen:
    """Shows lines in place of those shown before. A context manager; the last ones stay."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = 0

    def show(self, lines: Sequence[Line]) -> None:
        """As many as fit."""
        columns, rows = shutil.get_terminal_size()
        if len(lines) > rows - 1:
            more = Cell(f"({len(lines) - rows + 2} more lines do not fit)", "dim")
            lines = [*lines[: rows - 2], [more]]
        painted = paint(lines, columns - 1, colours=True)
        up = f"\x1b[{self._shown}A" if self._shown else ""
        text = "".join(f"{line}\x1b[K\n" for line in painted)
        self._out.write(f"\r{up}{text}\x1b[J")
        self._out.flush()
        self._shown = len(painted)

    def __enter__(self) -> "Screen":
        self._out.write("\x1b[?25l")  # no cursor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.write("\x1b[?25h")
        self._out.flush()

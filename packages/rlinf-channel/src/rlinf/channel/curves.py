"""The curves of a run, read from its metrics while they are written."""

import json
from pathlib import Path
from typing import Any

CURVES = (
    "reward",
    "eval_reward",
    "loss",
    "grad_norm",
    "kl_rollout",
    "length",
    "staleness",
    "seconds",
)
"""What is drawn of a run's metrics, where it has them."""
POINTS = 500
"""A curve of more steps is thinned out to so many points."""
STEP_BYTES = 8 << 20
"""So much of the end of a metrics file is read."""

Points = list[list[float]]


class Curves:
    """Follows a file of metrics: what was read is not read again.

    Args:
        path: One line of JSON a step; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Points] = {}
        self._at = 0
        self._rest = b""

    def read(self) -> dict[str, Points]:
        """Name -> [step, value] of each step, thinned out; {} where there is no such file."""
        try:
            with self._path.open("rb") as file:
                size = self._path.stat().st_size
                if size < self._at:  # the run went back, or began again
                    self._found, self._at, self._rest = {}, 0, b""
                file.seek(max(self._at, size - STEP_BYTES))
                data = file.read()
                self._at = file.tell()
        except OSError:
            return {}
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        return {name: points[:: -(-len(points) // POINTS)] for name, points in self._found.items()}

    def _take(self, line: bytes) -> None:
        try:
            step: dict[str, Any] = json.loads(line)
        except ValueError:  # its beginning was not read
            return
        for name in CURVES:
            if isinstance(value := step.get(name), int | float):
                self._found.setdefault(name, []).append([step["step"], value])

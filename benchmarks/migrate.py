"""What do the programs of docs/migrate gain by moving to rlinf-comm?

Each pair takes turns; a sample is the time of one step as the program itself measures it, without
the first one, which waits for processes and connections. TRL's pair runs where trl is installed.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import harness

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "migrate"
MEGA = 1_000_000
PAIRS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "broadcast 40 MB, gather": (
        "gather_torch.py", "gather_rlinf.py", ("--floats", str(10 * MEGA)),
    ),
    "actors, 4 MB weights, 2 x 4 MB frames": (
        "actors_queue.py", "actors_rlinf.py", ("--floats", str(MEGA), "--frames", "200"),
    ),
    "trl, 2 layers of 256": (
        "trl_one.py", "trl_two.py", ("--hidden", "256"),
    ),
}  # fmt: skip


def measure(quick: bool) -> dict[str, dict[str, object]]:
    """Seconds a step, before and after, and the ratio within a round."""
    rounds, steps = (1, 5) if quick else (5, 20)
    questions: dict[str, dict[str, object]] = {}
    for question, (before, after, arguments) in PAIRS.items():
        if before.startswith("trl") and importlib.util.find_spec("trl") is None:
            print(f"\n{question}: trl is not installed")
            continue
        pairs = [
            (_seconds(before, steps, arguments), _seconds(after, steps, arguments))
            for _ in range(rounds)
        ]
        row = {
            "before_s": statistics.median(old for old, _ in pairs),
            "after_s": statistics.median(new for _, new in pairs),
            "times": statistics.median(old / new for old, new in pairs),
        }
        print(
            f"\n{question}: {1e3 * row['before_s']:.1f} ms a step before, "
            f"{1e3 * row['after_s']:.1f} ms after, {row['times']:.1f} times as fast"
        )
        questions[question] = dict(row)
    return questions


def _seconds(program: str, steps: int, arguments: tuple[str, ...]) -> float:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / program), "--steps", str(steps), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    seconds: float = json.loads(lines[-1])["seconds"]
    return seconds


if __name__ == "__main__":
    print(harness.machine_line())
    measure(quick="--quick" in sys.argv)

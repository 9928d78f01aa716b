"""The second example of a tool does what its text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "tools" / "python_agent.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_learns_to_compute_by_programs() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    right = re.search(r"right: (\d\.\d+), programs run: 64, failed: 0", done.stdout)
    assert right is not None and float(right[1]) > 0.9, done.stdout

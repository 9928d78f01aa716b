"""The README's program runs, and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "packages/rlinf-workers/README.md"


def test_the_readme_runs(tmp_path: Path) -> None:
    text = README.read_text()
    program, output = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    assert text[: text.index(program)].count("\n") <= 25
    file = tmp_path / "readme.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60)
    assert done.stdout == output, done.stderr
    assert done.stderr == ""

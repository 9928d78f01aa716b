"""The program in the README runs and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "rlinf-sched" / "README.md"


WITHOUT_YAML = "import sys; sys.modules['yaml'] = None\n"


@pytest.mark.parametrize("before", ["", WITHOUT_YAML])
def test_the_readme_program(tmp_path: Path, before: str):
    text = README.read_text()
    program, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.S).groups()
    assert text[: text.index(program) + len(program)].count("\n") <= 25
    done = subprocess.run(
        [sys.executable, "-c", before + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
    assert (tmp_path / "plan.yaml").exists()

"""The README's program runs, prints what the README says, and is there by line 25."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages/rlinf-channel/README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)


def test_the_program_prints_what_it_says(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(blocks("python")[0])
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks("text")[0]
    assert done.stderr == ""


def test_the_program_is_near_the_top() -> None:
    assert README.read_text().splitlines().index("```") <= 25


def test_the_other_calls_exist() -> None:
    from rlinf.channel import Channel, Lease

    for owner, name in re.findall(r"(channel|lease)\.(\w+)\(", blocks("python")[1]):
        assert hasattr({"channel": Channel, "lease": Lease}[owner], name), name

"""Each distribution, built and installed alone, runs the program of its README."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {
    "rlinf-comm": [],
    "rlinf-channel": ["rlinf-comm"],
    "rlinf-sched": [],
    "rlinf-workers": ["rlinf-comm", "rlinf-channel", "rlinf-sched"],
}
MUST_BE_ABSENT = {
    "rlinf-comm": ["torch", "ray"],
    "rlinf-channel": ["torch", "ray"],
    "rlinf-sched": ["torch", "ray", "yaml", "rlinf.comm", "rlinf.channel", "rlinf.workers"],
    "rlinf-workers": [],
}
# A plain `torch` may bring a CUDA build of several gigabytes.
EXTRA = {"rlinf-workers": ["torch==2.13.0"]}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def call(*command: str | Path, timeout_s: float = 600) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd="/")
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / "packages" / name for name in NEEDS]
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, *sources)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in NEEDS}


@pytest.mark.parametrize("name", NEEDS)
def test_the_readme_runs_where_only_the_wheel_is_installed(
    name: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    chosen = [wheels[other] for other in (*NEEDS[name], name)]
    constraints = ["-c", ROOT / "constraints.txt"]
    call(python, "-m", "pip", "install", "-q", *constraints, *EXTRA.get(name, []), *chosen)
    for module in MUST_BE_ABSENT[name]:
        call(python, "-c", f"import importlib.util as u; assert u.find_spec({module!r}) is None")
    text = (ROOT / "packages" / name / "README.md").read_text()
    program, output = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)[:2]
    script = tmp_path / "program.py"
    script.write_text(program)
    assert call(python, script, timeout_s=120) == output


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_communication_passes_its_tests_on_later_pythons(
    version: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """Without torch, jax and the like: what needs them is skipped there."""
    interpreter = shutil.which(f"python{version}")
    if interpreter is None or subprocess.run([interpreter, "-c", ""], check=False).returncode:
        pytest.skip(f"there is no python{version} that runs here")
    call(interpreter, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    tools = ["hypothesis", "psutil", "pytest", "pytest-timeout", "trustme"]
    call(python, "-m", "pip", "install", "-q", *tools, wheels["rlinf-comm"])
    chosen = [ROOT / "tests" / "comm", "-m", "not slow and not gpu", "--rootdir", ROOT]
    config = ["-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-q"]
    said = call(python, "-m", "pytest", *config, *chosen)
    assert re.search(r"\d{3,} passed", said)

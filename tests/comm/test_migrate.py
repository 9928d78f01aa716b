"""The programs of docs/migrate: before and after, they compute the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "migrate"
SMALL = ("--steps", "2", "--floats", "1000")


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / name), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return json.loads(lines[-1])


def test_an_actor_learner_loop():
    before = run("actors_queue.py", *SMALL, "--frames", "5")
    assert run("actors_rlinf.py", *SMALL, "--frames", "5")["checksum"] == before["checksum"]


@pytest.mark.slow
def test_a_trainer_on_torch_distributed():
    pytest.importorskip("torch")
    before = run("gather_torch.py", *SMALL)
    assert run("gather_rlinf.py", *SMALL)["checksum"] == before["checksum"]


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("program", ["trl_one.py", "trl_two.py"])
def test_trl_with_generation_here_and_elsewhere(program):
    pytest.importorskip("trl")
    rewards = run(program, "--steps", "8")["rewards"]
    assert len(rewards) == 8
    assert all(0 <= reward <= 1 for reward in rewards)


def test_the_document_names_programs_that_are_there():
    text = (FOLDER.parent / "migrate.md").read_text()
    for program in FOLDER.glob("*_*.py"):
        assert program.name in text or program.name == "trl_task.py"

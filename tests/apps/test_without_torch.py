"""A program and its judges have no use for torch: 150 MB each, and seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

APPS = Path(__file__).parents[2] / "apps"
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import main
from settings import {config}
import cloudpickle

make = cloudpickle.loads(cloudpickle.dumps({config}().make_reward))
{make}
heavy = {{"torch", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("app", "config", "make"),
    [("rlhf", "RlhfConfig", "make()"), ("search_r1", "SearchConfig", "")],
)
def test_a_program_and_its_reward_import_no_torch(app: str, config: str, make: str) -> None:
    """The reward of search_r1 reads articles, which a test without them leaves alone."""
    program = PROGRAM.format(folder=str(APPS / app), config=config, make=make)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

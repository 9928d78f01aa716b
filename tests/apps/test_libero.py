"""The app in LIBERO: episodes with pictures and an instruction, collected, scored, learnt from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libero", reason='pip install "rlinf-workers[libero]"')

APP = Path(__file__).resolve().parent.parent.parent / "apps" / "embodied"
SHORT = (
    "env=libero_object",
    "imitation.episodes=2",
    "imitation.updates=20",
    "horizon=4",
    "trainer.minibatch=8",
    "trainer.epochs=1",
    "film.steps=0",
    "checkpoint.every=0",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plan", "kind", "steps"),
    [("temporal", "temporal", 2), (str(APP / "alternating.yaml"), "hybrid", 2), ("auto", None, 16)],
)
def test_episodes_are_learnt_from_in_every_plan(
    tmp_path: Path, plan: str, kind: str | None, steps: int
) -> None:
    told = (*SHORT, f"plan={plan}", f"steps={steps}", f"folder={tmp_path}")
    command = [sys.executable, str(APP / "main.py"), *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["decisions"] for line in lines] == [2 * 4] * steps
    assert all(line["env_steps"] == 2 * 4 * 4 for line in lines), "a decision is four actions"
    assert all(line["grad_norm"] > 0 for line in lines)
    if kind is None:
        assert "best of each kind:" in done.stdout and "bottleneck:" in done.stdout
    else:
        assert json.loads((tmp_path / "summary.json").read_text())["plan"] == kind

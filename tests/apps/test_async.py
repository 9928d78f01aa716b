"""Asynchronous training: its bound, learning within it, and what is killed meanwhile."""

import json
import math
from pathlib import Path

import pytest

from rlinf.workers.devices import local_cores
from tests.apps.jobs import SHORT, Started, metrics, run

needs_two_cores = pytest.mark.skipif(len(local_cores()) < 2, reason="one core only")
BOUND = 2
ASYNC = ("plan=spatial", f"scheduling.max_staleness={BOUND}")
CORRECTIONS = {
    "ratio": (),
    "decoupled": ("trainer.old_logprobs=trainer", "trainer.importance_cap=2"),
}
"""PPO on the ratio to the policy that sampled; or on that to the policy before the step, each token
weighed by how much likelier it had become until then, at most twice."""


def check(lines: list[dict[str, float]], steps: int, samples: int) -> None:
    """Each step was trained once on its own samples, none of them older than the bound."""
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert {line["scored"] for line in lines} == {samples}, "a sample was lost or came twice"
    assert all(line["staleness"] <= BOUND and line["stale"] == 0 for line in lines)
    assert all(math.isfinite(line["loss"]) and line["kl_rollout"] >= 0 for line in lines)


@needs_two_cores
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_no_sample_is_older_than_the_bound(tmp_path: Path, correction: str) -> None:
    arguments = (*ASYNC, *SHORT, *CORRECTIONS[correction], "steps=6", "launcher=inline")
    done = run(f"folder={tmp_path}", *arguments)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    check(lines, steps=6, samples=64)
    assert lines[0]["staleness"] == 0 and max(line["staleness"] for line in lines) > 0
    assert all(line["kl_rollout"] > 1e-6 for line in lines if line["staleness"] > 0)
    if correction == "decoupled":
        assert all(line["ratio_deviation"] < 1e-6 for line in lines), "to the policy before it"


def test_what_takes_turns_is_not_asynchronous() -> None:
    done = run("scheduling.max_staleness=1")
    assert done.returncode == 2 and "plan=spatial" in done.stderr


def test_stale_samples_want_a_correction() -> None:
    done = run(*ASYNC, "trainer.old_logprobs=trainer")
    assert done.returncode == 2 and "importance_cap" in done.stderr


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_it_learns_from_stale_samples(tmp_path: Path, correction: str, seed: int) -> None:
    arguments = (f"seed={seed}", *ASYNC, *CORRECTIONS[correction])
    done = run(f"folder={tmp_path}", *arguments, timeout_s=800)
    assert done.returncode == 0, done.stderr
    check(metrics(tmp_path), steps=60, samples=512)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_first"] < 0.50
    assert summary["reward_last"] > 0.60, "two versions behind it learns, a little slower"
    assert summary["reward_last"] - summary["reward_first"] > 0.25


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["rollout", "reward", "trainer"])
def test_what_is_killed_meanwhile_is_made_again(
    tmp_path: Path, started: list[Started], victim: str
) -> None:
    job = Started(tmp_path, *ASYNC, *SHORT, "steps=30", "checkpoint.every=4")
    started.append(job)
    job.wait_for_steps(6)
    job.worker(victim).kill()
    code, _, err = job.end(200)
    assert code == 0, err
    check(metrics(tmp_path), steps=30, samples=64)
    assert job.left_behind() == []


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_resumed_run_trains_each_step_once(tmp_path: Path) -> None:
    """What was begun ahead when the first run ended is begun again (K3)."""
    part = (f"folder={tmp_path}", *ASYNC, *SHORT, "launcher=inline", "checkpoint.every=2")
    for steps, more in ((3, ()), (7, ("resume=true",))):
        done = run(*part, f"steps={steps}", *more)
        assert done.returncode == 0, done.stderr
    check(metrics(tmp_path), steps=7, samples=64)

"""The app whose policies act in simulators, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlinf.workers.checkpoint import newest_checkpoint

pytest.importorskip("gymnasium", reason='pip install "rlinf-workers[mujoco]"')
pytest.importorskip("mujoco", reason='pip install "rlinf-workers[mujoco]"')

ROOT = Path(__file__).resolve().parent.parent.parent
MAIN = ROOT / "apps" / "embodied" / "main.py"
SMALL = (
    "env=inverted_pendulum",
    "env.parallelism=4",
    "env.lanes=2",
    "horizon=16",
    "trainer.minibatch=32",
    "trainer.epochs=2",
    "film.steps=0",
)
AHEAD = "plan=spatial scheduling.max_staleness=1"
LEARNT = ("policy_loss", "value_loss", "entropy", "grad_norm", "kl")


def run(*arguments: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAIN), *arguments], capture_output=True, text=True, timeout=timeout_s
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learnt(folder: Path) -> list[float]:
    return [line[name] for line in metrics(folder) for name in LEARNT]


@pytest.mark.timeout(500)
def test_inline_leaves_a_complete_run_folder(tmp_path: Path) -> None:
    done = run(*SMALL, f"folder={tmp_path}", "launcher=inline", "steps=3", "checkpoint.every=2")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["env_steps_per_s"] > 0
    assert [line["env_steps"] for line in metrics(tmp_path)] == [64] * 3
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert newest_checkpoint(tmp_path / "checkpoints").step == 3


def test_keys_that_are_not_known_are_refused() -> None:
    unknown = run("env=hovercraft")
    assert unknown.returncode == 2
    assert "env.name=hovercraft is not known: choose one of cartpole_balance" in unknown.stderr
    mistyped = run("env=reacher", "env.paralelism=2")
    assert "did you mean env.parallelism?" in mistyped.stderr
    ahead = run("env=reacher", "scheduling.max_staleness=1")
    assert "acting goes on beside learning, which plan=temporal does not allow for" in ahead.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    told = (*SMALL, f"folder={tmp_path}", "launcher=inline")
    assert run(*told, "steps=2").returncode == 0
    done = run(*told, "steps=4", "resume=true")
    assert done.returncode == 0, done.stderr
    assert [line["version"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", ["launcher=inline", "launcher=ray", AHEAD])
def test_one_interrupt_ends_after_the_step(tmp_path: Path, more: str) -> None:
    job = begun(tmp_path, "steps=100000", *more.split())
    try:
        after_steps(job, tmp_path, 3)
        os.killpg(job.pid, signal.SIGINT)
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 0, output
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    steps = [line["step"] for line in metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert newest_checkpoint(tmp_path / "checkpoints").step == len(steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_plans_change_nothing_of_what_is_learnt(tmp_path: Path) -> None:
    folders = {}
    for plan in ("temporal", "spatial"):
        folder = folders[plan] = tmp_path / plan
        done = run(*SMALL, f"folder={folder}", "launcher=inline", "steps=4", f"plan={plan}")
        assert done.returncode == 0, done.stderr
        assert json.loads((folder / "summary.json").read_text())["plan"] in (plan, "single")
    assert learnt(folders["temporal"]) == pytest.approx(learnt(folders["spatial"]), rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_acting_may_be_ahead_of_learning_within_its_bound(tmp_path: Path, launcher: str) -> None:
    told = (f"folder={tmp_path}", f"launcher={launcher}", "steps=5", *AHEAD.split())
    done = run(*SMALL, *told)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert [line["env_steps"] for line in lines] == [64] * 5
    assert [line["staleness"] for line in lines] == [0, 0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_grpo_runs_whole_episodes(tmp_path: Path) -> None:
    told = (f"folder={tmp_path}", "launcher=inline", "steps=2", "algorithm=grpo", "group=4")
    done = run(*SMALL, *told)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert [line["episodes"] for line in lines] <= [4, 4]
    assert all(line["env_steps"] <= 64 for line in lines)
    assert all(line["value_loss"] == 0 for line in lines)


def begun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a session of its own, so that it can be ended as a whole."""
    inherited = os.environ.get("PYTHONPATH")
    path = [str(ROOT / "tests" / "workers"), *([inherited] if inherited else [])]
    return subprocess.Popen(
        [sys.executable, str(MAIN), *SMALL, f"folder={folder}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


def after_steps(job: subprocess.Popen[str], folder: Path, count: int, *victim: str) -> list:
    """Waits until so many steps are done; then the processes that `find` finds, once there are."""
    deadline = time.monotonic() + 200
    path = folder / "metrics.jsonl"
    while True:
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()
        time.sleep(0.05)  # polls what other programs do
        if path.exists() and path.read_text().count("\n") >= count:
            found = find(job.pid, *victim) if victim else []
            if found or not victim:
                return found


def struck(folder: Path, victim: str, *arguments: str, after: int = 3) -> tuple[int, str]:
    """A run one of whose processes is killed once so many steps are done: exit code, output."""
    job = begun(folder, "steps=40", *arguments)
    try:
        after_steps(job, folder, after, *victim.split())[0].kill()
        output, _ = job.communicate(timeout=200)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, output


def find(root: int, *words: str) -> list[psutil.Process]:
    """Processes below `root` with the first word in their command, below these the next ..."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if words[0] in " ".join(process.cmdline()):
                found += find(process.pid, *words[1:]) if words[1:] else [process]
        except psutil.NoSuchProcess:
            continue
    return found


def lost_steps(folder: Path) -> list[int]:
    """Of the steps that did not have all of their decisions; none may have been repeated."""
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 41)), "no step was repeated"
    assert [line["version"] for line in lines] == list(range(1, 41)), "nothing learnt was lost"
    return [64 - int(line["env_steps"]) for line in lines if line["env_steps"] < 64]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("acting", ["acting=inside", "acting=apart", AHEAD])
@pytest.mark.parametrize("victim", ["simulator/0 simulation.process", "simulator/0", "policy/0"])
def test_whoever_is_killed_costs_its_episodes_only(
    tmp_path: Path, acting: str, victim: str
) -> None:
    if victim == "policy/0" and acting != "acting=apart":
        pytest.skip("the policy is in the simulator")
    code, output = struck(tmp_path, victim, *acting.split())
    assert code == 0, output
    short = lost_steps(tmp_path)
    assert len(short) <= 2 and sum(short) <= 64


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["renderer/0 simulation.process", "renderer/0"])
def test_a_renderer_that_is_killed_costs_a_film_only(tmp_path: Path, victim: str) -> None:
    world = ("env.world.kind=worlds:painted", "env.world.id=painted")
    code, output = struck(tmp_path, victim, *world, "film.steps=20", "film.every=2")
    assert code == 0, output
    assert not lost_steps(tmp_path)
    assert (tmp_path / "episode.gif").exists(), output
    if " " in victim:
        assert "no episode_" in output and "ended by signal 9" in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_policy_may_act_in_a_worker_of_its_own(tmp_path: Path) -> None:
    """In turn, in alternation, and as is found best: the same is learnt."""
    lanes = ("acting=apart", "steps=4", "horizon=8", "trainer.minibatch=16")
    plans = {"temporal": "temporal", "hybrid": str(MAIN.parent / "alternating.yaml")}
    folders = {}
    for kind, plan in plans.items():
        folder = folders[kind] = tmp_path / kind
        done = run(*SMALL, f"folder={folder}", *lanes, f"plan={plan}")
        assert done.returncode == 0, done.stderr
        assert json.loads((folder / "summary.json").read_text())["plan"] == kind
    assert learnt(folders["temporal"]) == pytest.approx(learnt(folders["hybrid"]), rel=1e-3)
    done = run(*SMALL, f"folder={tmp_path / 'auto'}", *lanes, "steps=16", "plan=auto")
    assert done.returncode == 0, done.stderr
    assert "best of each kind:" in done.stdout and "bottleneck:" in done.stdout

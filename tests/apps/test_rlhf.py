"""The main job, as a user starts it: a program of its own, real processes, real files."""

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlinf.workers.checkpoint import newest_checkpoint
from tests.apps.jobs import SHORT, Arguments, Ending, Started, losses, metrics, run, run_each

SECTION_5_1 = """\
communication:
  backend_priority: [nccl, gloo]
  serialization: structured
channels:
  experience_queue:
    type: weighted
    buffer_size: 10GB
    offload_to_cpu: true
scheduling:
  batch_size: 64
  sync_interval: 20
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with these settings, in one process."""
    folder = tmp_path_factory.mktemp("finished")
    file = folder / "config.yaml"
    file.write_text(SECTION_5_1)
    sizes = ("sft.stop_at=0.15", "rollout.samples=4", "steps=3", "launcher=inline")
    done = run(f"config={file}", f"folder={folder / 'run'}", *sizes)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.timeout(400)
def test_a_run_leaves_a_complete_folder(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = json.loads((finished / "summary.json").read_text())
    assert list(summary) == [
        "steps",
        "reward_first",
        "reward_last",
        "tokens_per_s",
        "seconds",
        "plan",
        "peak_rss_bytes",
    ]
    assert summary["steps"] == 3 and summary["plan"] == "temporal"
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(metrics(finished)) == 3
    events = EventAccumulator(str(finished))
    events.Reload()
    assert len(events.Scalars("reward")) == 3


@pytest.mark.timeout(400)
def test_a_batch_and_a_sync_interval_are_what_they_say(finished: Path) -> None:
    """One sync in twenty steps: what is learnt from gets older by a version a step."""
    lines = metrics(finished)
    assert [line["scored"] for line in lines] == [64 * 4] * 3
    assert [line["staleness"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.parallel.tensor=2", "trainer.engine=megatron splits a model; torch does not"),
        ("rollout=sglang", "has the keys rollout.prompts, rollout.samples"),
    ],
)
def test_what_would_do_nothing_is_refused(argument: str, message: str) -> None:
    done = run(argument)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_execution_of_the_program_gives_the_same_losses(tmp_path: Path) -> None:
    runs = {}
    for launcher in ("inline", "ray"):
        for plan in ("temporal", "spatial"):
            folder = tmp_path / f"{launcher}-{plan}"
            done = run(f"folder={folder}", f"launcher={launcher}", f"plan={plan}", *SHORT)
            assert done.returncode == 0, done.stderr
            runs[launcher, plan] = losses(folder)
    saved = tmp_path / "inline-spatial" / "plan.yaml"
    done = run(f"folder={tmp_path / 'saved'}", f"plan={saved}", "launcher=inline", *SHORT)
    assert done.returncode == 0, done.stderr
    runs["inline", "saved"] = losses(tmp_path / "saved")
    reference = runs["inline", "temporal"]
    assert all(norm > 1e-2 for norm in reference[1::2])
    for execution, found in runs.items():
        assert found == pytest.approx(reference, rel=1e-4, abs=1e-6), execution


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_tiny_model_learns(tmp_path: Path, algorithm: str, seed: int) -> None:
    arguments = (f"folder={tmp_path}", f"seed={seed}", f"algorithm={algorithm}", "eval.every=20")
    done = run(*arguments, timeout_s=800)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_first"] < 0.50
    assert summary["reward_last"] > 0.70
    assert summary["reward_last"] - summary["reward_first"] > 0.25
    held_out = [line["eval_reward"] for line in metrics(tmp_path) if "eval_reward" in line]
    assert len(held_out) == 3
    assert held_out[-1] > 0.70


HYBRID = """\
format: rlinf-plan/1
batch: 8
devices: ['core:0', 'core:1']
seconds: null
tree:
  spatial:
    micro_batches: 4
    first: {component: rollout, devices: 1}
    second:
      temporal:
        first: {component: critic, devices: 1}
        second: {component: trainer, devices: 1}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_a_critic_every_execution_gives_the_same_losses(tmp_path: Path) -> None:
    hybrid = tmp_path / "hybrid.yaml"
    hybrid.write_text(HYBRID)
    found = []
    for launcher, plan in (("inline", "temporal"), ("inline", hybrid), ("ray", "temporal")):
        folder = tmp_path / str(len(found))
        arguments = ("algorithm=ppo", "trainer.frozen_steps=1", f"plan={plan}", *SHORT)
        done = run(f"folder={folder}", f"launcher={launcher}", *arguments)
        assert done.returncode == 0, done.stderr
        names = ("loss", "value_loss", "grad_norm", "value_grad_norm")
        found.append([[line[name] for name in names] for line in metrics(folder)])
    reference, *others = found
    assert reference[0][2] == 0, "the first step is the critic's alone"
    assert all(line[2] > 0 for line in reference[1:])
    for other in others:
        for line, expected in zip(other, reference, strict=True):
            assert line == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_is_held_to_the_policy_it_began_with(tmp_path: Path, algorithm: str) -> None:
    """A run that goes on from a checkpoint is held to the same policy as the uninterrupted one."""
    settings = ("trainer.kl_coefficient=0.5", "trainer.frozen_steps=0", "launcher=inline")
    held = (f"algorithm={algorithm}", *settings, *SHORT)
    found = []
    for parts in (("steps=4",), ("steps=2", "steps=4")):
        folder = tmp_path / str(len(found))
        for resume, steps in enumerate(parts):
            done = run(f"folder={folder}", *held, steps, *["resume=true"] * resume)
            assert done.returncode == 0, done.stderr
        found.append(losses(folder))
    assert found[0] == found[1] and all(norm > 1e-2 for norm in found[0][1::2])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_critic_of_two_ranks_is_the_same_critic(tmp_path: Path) -> None:
    found = {}
    for ranks, launcher in ((1, "inline"), (2, "ray")):
        folder = tmp_path / str(ranks)
        arguments = ("algorithm=ppo", "trainer.frozen_steps=1", f"critic.ranks={ranks}", *SHORT)
        done = run(f"folder={folder}", f"launcher={launcher}", *arguments)
        assert done.returncode == 0, done.stderr
        names = ("loss", "value_loss", "grad_norm", "value_grad_norm")
        found[ranks] = [line[name] for line in metrics(folder) for name in names]
    assert found[2] == pytest.approx(found[1], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_old_policy_can_be_read_by_a_worker_of_its_own(tmp_path: Path) -> None:
    found = {}
    for kind in ("trainer", "inference"):
        arguments = (f"trainer.old_logprobs={kind}", "launcher=inline", *SHORT)
        done = run(f"folder={tmp_path / kind}", *arguments)
        assert done.returncode == 0, done.stderr
        found[kind] = losses(tmp_path / kind)
    assert found["inference"] == pytest.approx(found["trainer"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["dapo", "rloo", "reinforce++", "gspo", "dr_grpo", "cispo"])
def test_every_algorithm_runs(tmp_path: Path, algorithm: str) -> None:
    arguments = (f"algorithm={algorithm}", "launcher=inline", "eval.every=2", *SHORT)
    done = run(f"folder={tmp_path}", *arguments)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "eval_reward" in line] == [2]
    assert all(line["version"] == line["step"] and line["grad_norm"] > 0 for line in lines)
    assert all(line["kl_rollout"] >= 0 and line["ratio_deviation"] < 1e-4 for line in lines)
    samples = {line["scored"] for line in lines}
    if algorithm == "dapo":  # more rounds where a round has groups with equal rewards
        assert max(samples) > 64 and samples <= set(range(64, 193, 8))
        assert all(line["informative"] >= 8 or line["scored"] > 64 for line in lines)
    else:
        assert samples == {64}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine", ["engine=fsdp", "engine=megatron parallel.tensor=2", "engine=megatron"]
)
def test_two_trainer_ranks_and_on_with_one(tmp_path: Path, engine: str) -> None:
    """The whole job; the checkpoint of two processes goes on in one with the plain engine."""
    if "megatron" in engine:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    chosen = [f"trainer.{setting}" for setting in engine.split()]
    done = run(f"folder={tmp_path}", *SHORT, "steps=2", "trainer.ranks=2", *chosen)
    assert done.returncode == 0, done.stderr
    done = run(f"folder={tmp_path}", *SHORT, "steps=4", "resume=true")
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["version"] for line in lines] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert all(line["ratio_deviation"] < 1e-4 for line in lines), "it trains what was sampled"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_rollout_worker_is_replaced_and_the_run_ends_well(
    tmp_path: Path, started: list[Started]
) -> None:
    job = Started(tmp_path, "steps=30", "sft.steps=5")
    started.append(job)
    job.wait_for_steps(3)
    victim = job.worker("rollout")
    victim.kill()
    code, _, err = job.end(200)
    assert code == 0, err
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert {line["scored"] for line in lines} == {32 * 16}, "a sample was lost or came twice"
    assert job.left_behind() == []


def outcomes(folder: Path) -> list[dict[str, float]]:
    """The metrics without those that are times."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in metrics(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(f"folder={folder}", "launcher=inline", *SHORT, "steps=8")
    assert done.returncode == 0, done.stderr
    assert any(line["grad_norm"] > 1e-2 for line in metrics(folder))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, undisturbed: Path) -> None:
    """The same samples, so the same rewards, and the same losses to the last bit.

    The first part had all its steps; the checkpoint at its end is damaged, so that the one before
    it is gone on from.
    """
    part = (f"folder={tmp_path}", "launcher=inline", *SHORT, "checkpoint.every=2")
    done = run(*part, "steps=5")
    assert done.returncode == 0, done.stderr
    assert outcomes(tmp_path) == outcomes(undisturbed)[:5]
    (tmp_path / "checkpoints" / "step-000005" / "manifest.json").write_text("torn")
    done = run(*part, "resume=true", "steps=8")
    assert done.returncode == 0, done.stderr
    assert "step-000005" in done.stderr and "config.steps 5 -> 8" in done.stderr
    assert outcomes(tmp_path) == outcomes(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("every", [0, 3])
def test_a_killed_trainer_goes_back_to_the_checkpoint_or_the_beginning(
    tmp_path: Path, started: list[Started], undisturbed: Path, every: int
) -> None:
    job = Started(tmp_path, *SHORT, "steps=8", f"checkpoint.every={every}")
    started.append(job)
    job.wait_for_steps(4)
    job.worker("trainer").kill()
    code, _, err = job.end(200)
    assert code == 0, err
    assert f"went back to step {3 if every else 0}" in err or "to step 6" in err
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), rel=1e-4, abs=1e-6)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 9))
    assert job.left_behind() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_critic_takes_the_trainer_back_with_it(
    tmp_path: Path, started: list[Started]
) -> None:
    arguments = (*SHORT, "algorithm=ppo", "steps=8", "checkpoint.every=3")
    done = run(f"folder={tmp_path / 'undisturbed'}", "launcher=inline", *arguments)
    assert done.returncode == 0, done.stderr
    job = Started(tmp_path / "killed", *arguments)
    started.append(job)
    job.wait_for_steps(4)
    job.worker("critic").kill()
    code, _, err = job.end(200)
    assert code == 0, err
    assert "critic/0" in err and "went back to step" in err
    wanted = losses(tmp_path / "undisturbed")
    assert losses(tmp_path / "killed") == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert job.left_behind() == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_one_interrupt_ends_after_the_step(
    tmp_path: Path, started: list[Started], launcher: str
) -> None:
    job = Started(tmp_path, f"launcher={launcher}", "steps=1000", "sft.steps=5")
    started.append(job)
    job.wait_for_steps(3)
    os.killpg(job.process.pid, signal.SIGINT)
    code, _, err = job.end(60)
    assert code == 0, err
    summary = json.loads((tmp_path / "summary.json").read_text())
    steps = len(metrics(tmp_path))
    assert 3 <= summary["steps"] == steps < 1000
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and newest.step == steps
    assert job.left_behind() == []


INLINE = ("launcher=inline", *SHORT)
UNUSABLE = {
    ("trainer.lrr=1",): "unknown key trainer.lrr: did you mean trainer.optimiser.lr?",
    ("steps=soon",): "steps must be int",
    ("algorithm=grop",): "algorithm=grop is not known: choose one of cispo, dapo",
    ("model=/no/such/model", *INLINE): "/no/such/model",
    ("plan=nowhere.yaml", *INLINE): "plan=nowhere.yaml",
    ("folder=/proc/none", *INLINE): "cannot write the run folder /proc/none",
    ("communication.host=203.0.113.7", *INLINE): "203.0.113.7",
    ("communication.pool_bytes=1000000000000000", *INLINE): "pool",
    ("trainer.old_logprobs=trainer", "scheduling.sync_interval=4"): "importance_cap",
    ("channels.experience_queue.type=mine", "sft.steps=0", "launcher=inline"): (
        "no channel policy 'mine' (installed: adaptive, least_loaded"
    ),
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Arguments, Ending]:
    return run_each([*UNUSABLE, ("--help",)], tmp_path_factory.mktemp("endings"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", UNUSABLE, ids=lambda arguments: arguments[0])
def test_what_cannot_be_used_is_one_clear_error(
    endings: Mapping[Arguments, Ending], arguments: Arguments
) -> None:
    ending = endings[arguments]
    assert ending.code in (1, 2)
    assert "Traceback" not in ending.err
    last = ending.err.strip().splitlines()[-1]
    assert last.startswith("error: ") and UNUSABLE[arguments] in last, ending.err


@pytest.mark.timeout(300)
def test_help_teaches(endings: Mapping[Arguments, Ending]) -> None:
    ending = endings[("--help",)]
    assert ending.code == 0
    assert "plan=auto" in ending.out and "trainer.optimiser.lr" in ending.out

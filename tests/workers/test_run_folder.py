"""Where a run is written, what it goes on from, and what its files say after it went back."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlinf.sched import FlowGraph, temporal_plan
from rlinf.workers import ConfigError
from rlinf.workers.checkpoint import Checkpoint, CheckpointConfig, Checkpoints
from rlinf.workers.errors import CheckpointTorn
from rlinf.workers.program import described, run_folder
from rlinf.workers.run import Run

PLAN = temporal_plan(FlowGraph.chain("rollout", "trainer"), ("core:0",), 8)


def saved(folder: Path, *steps: int) -> list[Checkpoint]:
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=9))
    found = []
    for step in steps:
        with checkpoints.draft(step) as draft:
            found.append(draft.commit([], {}))
    return found


def test_a_new_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, origin = run_folder("app", None, False)
    assert folder.parent == Path("runs/app") and origin is None
    assert run_folder("app", Path("here"), False) == (Path("here"), None)


def test_a_run_that_has_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    with pytest.raises(ConfigError, match="a run of 4 steps: resume=true goes on with it"):
        run_folder("app", tmp_path, False)


def test_a_run_without_a_checkpoint_is_written_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_folder("app", tmp_path, False) == (tmp_path, None) and caplog.text == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run_folder("app", tmp_path, False) == (tmp_path, None)
    assert f"folder={tmp_path} holds a run without a checkpoint: it is written" in caplog.text


def test_what_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = Path("runs/app/20260101-000000"), Path("runs/app/20260102-000000")
    saved(old, 8)
    first, second = saved(new, 2, 4)
    assert run_folder("app", None, True) == (new, second)
    assert run_folder("app", old, True)[0] == old
    assert run_folder("app", None, new) == (new, second)
    assert run_folder("app", Path("other"), new) == (Path("other"), second)
    assert run_folder("app", None, first.folder) == (new, first)
    assert run_folder("app", Path("other"), first.folder) == (Path("other"), first)


def test_what_cannot_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder runs/app"):
        run_folder("app", None, True)
    with pytest.raises(ConfigError, match="there is no folder nowhere"):
        run_folder("app", None, Path("nowhere"))
    [one] = saved(tmp_path, 1)
    (one.folder / "manifest.json").write_text("")
    with pytest.raises(CheckpointTorn, match="step-000001"):
        run_folder("app", None, one.folder)


def test_a_run_without_a_complete_checkpoint_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_folder("app", tmp_path, True) == (tmp_path, None)
    assert "no complete checkpoint: the run begins" in caplog.text


@dataclass(frozen=True)
class Settings:
    steps: int = 60
    folder: Path | None = None
    resume: bool | Path = False


def test_other_settings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = described(Settings(folder=tmp_path), PLAN)
    with Checkpoints(tmp_path, about=lambda: about).draft(1) as draft:
        origin = draft.commit([], about)
    origin = Checkpoint.load(origin.folder)
    with caplog.at_level(logging.WARNING):
        Checkpoints(tmp_path, origin=origin, about=lambda: about)
        assert caplog.text == ""
        Checkpoints(tmp_path, origin=origin, about=lambda: described(Settings(80), PLAN))
    assert "with other settings: config.steps 60 -> 80" in caplog.text


def test_what_did_not_happen_is_not_in_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def record(run: Run, step: int, reward: float) -> None:
        run.begin_step()
        run.record(step, {"reward": reward, "tokens": 10.0, "staleness": 0.0})

    with Run(tmp_path, show=False) as run:
        run.go_back(0)
        for step in range(1, 6):
            record(run, step, 0.1 * step)
        run.go_back(3)
        record(run, 4, 0.9)
        assert run.finish().steps == 4
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # cut off by a crash
    with Run(tmp_path, show=False) as run:
        run.go_back(4)
        record(run, 5, 1.0)
        summary = run.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["reward"] for line in lines[3:]] == [0.9, 1.0]
    assert summary.steps == 5 and summary.tokens_per_s > 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4, 5]

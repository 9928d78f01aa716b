"""Checkpoints: complete or not there, whatever is cut off or damaged."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from rlinf.workers.checkpoint import (
    Checkpoint,
    CheckpointConfig,
    Checkpoints,
    SavedFile,
    newest_checkpoint,
    seal,
)
from rlinf.workers.errors import CheckpointFailed, CheckpointTorn


def write(folder: Path, text: str) -> list[SavedFile]:
    path = folder / "worker-0.json"
    path.write_text(text)
    return [seal(path)]


def save(checkpoints: Checkpoints, step: int) -> Checkpoint:
    with checkpoints.draft(step) as draft:
        return draft.commit(write(draft.folder, f"step {step}"), {"position": step})


def steps(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path), 3)
    loaded = Checkpoint.load(saved.folder)
    assert loaded == saved
    assert (loaded.step, loaded.state) == (3, {"position": 3})
    assert (loaded.folder / "worker-0.json").read_text() == "step 3"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    for step in (5, 10, 1_000_000, 15):
        save(checkpoints, step)
    assert steps(tmp_path) == ["step-000015", "step-1000000"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step == 1_000_000


def test_a_draft_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(KeyError), checkpoints.draft(1) as draft:
        write(draft.folder, "half")
        raise KeyError
    assert steps(tmp_path) == []


def truncate(folder: Path) -> None:
    path = folder / "worker-0.json"
    os.truncate(path, 3)


def flip(folder: Path) -> None:
    path = folder / "worker-0.json"
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)


def edit(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"position": 2', '"position": 7'))


DAMAGE = {
    "a file is short": (truncate, "3 of 6 bytes"),
    "a bit is different": (flip, "is not what was written"),
    "a file is gone": (
        lambda folder: (folder / "worker-0.json").unlink(),
        "worker-0.json: No such",
    ),
    "the manifest is gone": (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
    "the manifest is torn": (
        lambda folder: os.truncate(folder / "manifest.json", 40),
        "no manifest",
    ),
    "the manifest is empty": (
        lambda folder: os.truncate(folder / "manifest.json", 0),
        "no manifest",
    ),
    "the manifest was changed": (edit, "was changed"),
    "nothing is there": (lambda folder: [p.unlink() for p in folder.iterdir()], "no manifest"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    latest = save(checkpoints, 2)
    harm, words = DAMAGE[damage]
    harm(latest.folder)
    with pytest.raises(CheckpointTorn, match=words):
        Checkpoint.load(latest.folder)
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    assert "step-000002" in caplog.text and "passed over" in caplog.text
    checkpoints.set_aside_after(1)
    assert steps(tmp_path) == ["aside-step-000002", "step-000001"]
    save(checkpoints, 2)
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 2


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    saved = save(Checkpoints(tmp_path), 1)
    path = saved.folder / "manifest.json"
    content = json.loads(path.read_text())["content"] | {"format": 99}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "content": content}))
    with pytest.raises(CheckpointTorn, match="has format 99"):
        Checkpoint.load(saved.folder)


def die_at(folder: Path, name: str, count: int) -> None:
    """Save step 2, and be killed at the count-th call of os.`name`: a process of its own."""
    original = getattr(os, name)
    calls = 0

    def call(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, name, call)
    save(Checkpoints(folder, CheckpointConfig(keep=1)), 2)


@pytest.mark.parametrize(
    ("name", "count"),
    [("fsync", 1), ("fsync", 2), ("fsync", 3), ("rename", 1), ("fsync", 4), ("rename", 2)],
)
def test_a_crash_while_it_is_written_leaves_the_one_before(
    tmp_path: Path, name: str, count: int
) -> None:
    """At each call that brings something to the disk, in this order."""
    save(Checkpoints(tmp_path), 1)
    child = multiprocessing.get_context("spawn").Process(
        target=die_at, args=(tmp_path, name, count)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    renamed = (name, count) in (("fsync", 4), ("rename", 2))
    assert newest.step == (2 if renamed else 1)
    save(Checkpoints(tmp_path, CheckpointConfig(keep=1)), 3)
    assert steps(tmp_path) == ["step-000003"], "what the dead one left is removed"


def test_a_file_that_is_not_seen_here_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with (
        pytest.raises(CheckpointFailed, match=r"step 2 .* those before it are as they were"),
        checkpoints.draft(2) as draft,
    ):
        draft.commit([SavedFile("elsewhere.json", 3, "00")], {})
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    assert steps(tmp_path) == ["step-000001"]


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(CheckpointFailed, match="/proc/none"):
        Checkpoints(Path("/proc/none/checkpoints")).draft(1)


def test_the_origin_may_lie_elsewhere(tmp_path: Path) -> None:
    first = save(Checkpoints(tmp_path / "a"), 7)
    going_on = Checkpoints(tmp_path / "b", origin=first)
    assert going_on.newest() == first
    second = save(going_on, 9)
    assert going_on.newest() == second
    shutil.rmtree(second.folder)
    assert going_on.newest() == first

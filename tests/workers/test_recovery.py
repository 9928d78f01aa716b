"""A worker that holds state dies: back to a checkpoint, and every sample counts once."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from rlinf.channel import ChannelUnknown
from rlinf.workers import Cluster, ClusterConfig, StageError, WorkerDied, wait_all
from rlinf.workers.checkpoint import CheckpointConfig, Checkpoints, newest_checkpoint
from rlinf.workers.errors import CallError
from rlinf.workers.position import Position
from rlinf.workers.recovery import Recovery
from rlinf.workers.testing import Fault, launch, placements, prompts, run_step, run_steps

CONFIG = ClusterConfig(silence_s=6.0, heartbeat_s=0.5)


def run(
    folder: Path, faults: dict[str, Fault], steps: int = 5, every: int = 2, resume: bool = False
) -> list[Any]:
    origin = newest_checkpoint(folder) if resume else None
    checkpoints = Checkpoints(folder, CheckpointConfig(every), origin)
    with Cluster(CONFIG, "inline") as cluster:
        groups = launch(cluster, placements("temporal", cluster.devices, 12), faults)
        return run_steps(cluster, groups, checkpoints, steps)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    outcomes = run(tmp_path_factory.mktemp("undisturbed"), {})
    assert outcomes[-1] == [number for step in range(1, 6) for number in prompts(step, 12)]
    return outcomes


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_steps_since_the_checkpoint_are_repeated(
    tmp_path: Path, undisturbed: list[Any], step: int
) -> None:
    fault = Fault("exit", prompts(step, 12)[5])
    assert run(tmp_path, {"learner": fault}) == undisturbed


def test_without_checkpoints_all_begins_again(tmp_path: Path, undisturbed: list[Any]) -> None:
    fault = Fault("exit", prompts(4, 12)[5])
    assert run(tmp_path, {"learner": fault}, every=0) == undisturbed
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step == 5, "the end is saved all the same"


def test_both_ends_of_a_sync_at_once(tmp_path: Path, undisturbed: list[Any]) -> None:
    faults = {"learner": Fault("exit", prompts(3, 12)[5]), "sampler": Fault("exit", 3, 0, "sync")}
    assert run(tmp_path, faults) == undisturbed


@pytest.mark.parametrize("late", [1, 9])
def test_others_may_hear_of_a_loss_late(tmp_path: Path, undisturbed: list[Any], late: int) -> None:
    """By calling the one that is gone when the next one runs; not for ever, however."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(2))
    outcomes: dict[int, Any] = {}
    with Cluster(CONFIG, "inline") as cluster:
        faults = {"learner": Fault("exit", prompts(3, 12)[5])}
        groups = launch(cluster, placements("temporal", cluster.devices, 12), faults)
        recovery = Recovery(cluster, [groups[-1]], checkpoints)
        left, found = late, contextlib.nullcontext()
        if late > 3:
            found = pytest.raises(WorkerDied, match="step 3 has failed 4 times")
        with found:
            for attempt in recovery.steps(5):
                with attempt as step:
                    again = {one.worker: one.incarnation for one in cluster.statistics()}
                    if step == 3 and again["learner/0"] and left:
                        left -= 1
                        text = "sampler/0.load raised PeerLost: learner/0 is gone"
                        raise CallError(text, worker="sampler/0", method="load", kind="PeerLost")
                    outcomes[step] = run_step(cluster, groups, step)[-1].result
        if late == 1:
            assert left == 0 and list(outcomes.values()) == undisturbed[:-1]


def test_a_run_in_parts_is_the_whole_run(tmp_path: Path, undisturbed: list[Any]) -> None:
    """Whatever a part did after its last checkpoint is done again, not twice."""
    parts: list[Any] = []
    for steps in (1, 3, 5):
        parts += run(tmp_path, {}, steps, resume=bool(parts))
    history = parts.pop()
    assert [part for part in parts if isinstance(part, dict)] == undisturbed[:-1]
    assert history == undisturbed[-1]


def test_a_run_that_has_all_its_steps_trains_nothing_and_one_that_wants_more_goes_on(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    run(tmp_path, {}, steps=4)
    assert run(tmp_path, {}, steps=4, resume=True) == [undisturbed[-1][:48]]
    assert run(tmp_path, {}, steps=5, resume=True) == [undisturbed[4], undisturbed[-1]]


def test_a_step_that_fails_again_and_again_stops_the_job(tmp_path: Path) -> None:
    """With the first cause, although the steps before it succeed each time."""
    fault = Fault("exit", prompts(4, 12)[5], None)
    with pytest.raises(WorkerDied) as caught:
        run(tmp_path, {"learner": fault}, every=2)
    assert "learner/0 died: it called sys.exit(3); step 4 has failed 4 times" in str(caught.value)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step == 2


def test_the_error_of_a_program_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="ValueError: this is bad"):
        run(tmp_path, {"learner": Fault("raise", prompts(2, 12)[5])})


def test_a_damaged_checkpoint_is_not_gone_back_to(
    tmp_path: Path, undisturbed: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, {}, steps=4)
    (tmp_path / "step-000004" / "learner-0.json").write_text("{}")
    assert run(tmp_path, {}, resume=True) == [*undisturbed[2:5], undisturbed[-1]]
    assert "step-000004: learner-0.json is not what was written" in caplog.text
    assert (tmp_path / "aside-step-000004").is_dir()


class Log:
    """A journal that notes what it is told."""

    def __init__(self, stop_after: int) -> None:
        self.told: list[str] = []
        self._left = stop_after

    @property
    def stopping(self) -> bool:
        return self._left == 0

    def begin(self, steps: int) -> None:
        self.told.append(f"begin {steps}")

    def begin_step(self) -> None:
        self._left -= 1
        self.told.append("step")

    def go_back(self, step: int) -> None:
        self.told.append(f"go back {step}")


def test_one_that_is_told_to_stop_saves_the_step_under_way(tmp_path: Path) -> None:
    journal, position = Log(stop_after=2), Position()
    with Cluster(CONFIG, "inline") as cluster:
        groups = launch(cluster, {})
        recovery = Recovery(
            cluster, groups[2:], Checkpoints(tmp_path), journal=journal, position=position
        )
        for attempt in recovery.steps(9):
            with attempt as step:
                position.draw(3)
                run_step(cluster, groups, step)
                position.trained([step])
    assert journal.told == ["begin 9", "go back 0", "step", "step"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.step == 2
    assert newest.state["position"] == {"next": 6, "in_flight": [0, 3, 4, 5]}


def test_the_channels_of_a_failed_iteration_are_emptied() -> None:
    with Cluster(CONFIG, "inline") as cluster:
        groups = launch(cluster, {}, {"scorer": Fault("raise", prompts(1, 12)[11])})
        failed = cluster.channels(1, "prompts", "samples", "scored")
        failed[0].put_many(prompts(1, 12))
        failed[0].close()
        sampler, scorer, learner = groups
        sampler.load().result(60)
        with pytest.raises(StageError):
            wait_all(
                [
                    sampler.sample(failed[0], failed[1]),
                    scorer.score(failed[1], failed[2]),
                    learner.learn(failed[2]),
                ]
            )
        for step in (2, 3):  # by then everybody has given back what it held
            run_step(cluster, groups, step)
        for channel in failed:
            with pytest.raises(ChannelUnknown):
                channel.qsize()

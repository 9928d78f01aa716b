"""Workers that die: a restartable one is replaced with nothing lost, another one ends the job."""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from rlinf.workers import Cluster, ClusterConfig, StageError, StateLost, WorkerDied, flow
from rlinf.workers.records import StageReport
from rlinf.workers.testing import Fault, Sample, launch, placements, prompts, run_step, shared_ray

CONFIG = ClusterConfig(silence_s=6.0, heartbeat_s=0.5)


def run(launcher: str, faults: dict[str, Fault], steps: int = 2) -> list[Any]:
    """The results of a run in which all take turns on one core, whatever happens to them."""
    if launcher == "ray":
        shared_ray()
    with Cluster(CONFIG, launcher) as cluster:
        groups = launch(cluster, placements("temporal", cluster.devices, 12), faults)
        return [run_step(cluster, groups, step)[-1].result for step in range(1, steps + 1)]


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return run("inline", {})


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sampler", "kill"),
        slow("scorer", "kill"),
        slow("sampler", "crash"),
        slow("scorer", "exit"),
        slow("sampler", "stop"),
    ],
)
def test_a_stage_worker_that_dies_is_replaced(undisturbed: list[Any], name: str, kind: str) -> None:
    """With what it had not committed redone, and all that it had committed kept."""
    assert run("ray", {name: Fault(kind, prompts(1, 12)[5])}) == undisturbed


def test_a_thread_that_ends_is_replaced_too(undisturbed: list[Any]) -> None:
    assert run("inline", {"sampler": Fault("exit", prompts(2, 12)[5])}) == undisturbed


def test_one_that_dies_when_all_it_wrote_is_read_finds_its_channels(
    undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had closed its output, but could not say so any more: it is called again."""
    died, scored = threading.Event(), threading.Event()

    def report(**fields: Any) -> StageReport:
        if fields["stage"] == "score":
            scored.set()
        if fields["stage"] == "sample" and not died.is_set():
            died.set()
            assert scored.wait(30)
            time.sleep(0.5)  # what the controller does about that
            sys.exit(3)
        return StageReport(**fields)

    monkeypatch.setattr(flow, "StageReport", report)
    assert run("inline", {}) == undisturbed
    assert died.is_set()


@pytest.mark.slow
def test_a_program_that_waits_for_something_else_is_told_the_cause() -> None:
    shared_ray()
    with pytest.raises(WorkerDied, match="scorer/0"), Cluster(CONFIG, "ray") as cluster:
        _, scorer, _ = launch(cluster, {}, {"scorer": Fault("kill", 7, None)})
        given, scored, answers = cluster.channels(1, "given", "scored", "answers")
        given.put_many([Sample(7, np.zeros(16))])
        given.close()
        scorer.score(given, scored)
        answers.get(timeout=60)


@pytest.mark.slow
def test_two_at_once(undisturbed: list[Any]) -> None:
    faults = {
        "sampler": Fault("kill", prompts(1, 12)[3]),
        "scorer": Fault("kill", prompts(1, 12)[8]),
    }
    assert run("ray", faults) == undisturbed


def test_a_worker_that_dies_again_and_again_ends_the_job() -> None:
    fault = Fault("exit", prompts(1, 12)[5], incarnation=None)
    with pytest.raises(WorkerDied) as caught:
        run("inline", {"scorer": fault})
    assert "worker scorer/0" in str(caught.value)
    assert "died: it called sys.exit(3); it died 4 times in a row" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", "killed from outside"),
        slow("crash", "crashed with SIGSEGV"),
        slow("exit", "exited with code 3"),
    ],
)
def test_the_death_of_one_with_state_is_told_to_a_program_that_has_no_checkpoints(
    kind: str, words: str
) -> None:
    with pytest.raises(StateLost) as caught:
        run("ray", {"learner": Fault(kind, prompts(1, 12)[5])})
    error = caught.value
    assert error.worker == "learner/0" and error.pid
    assert f"worker learner/0 (process {error.pid}) died" in str(error)
    assert words in str(error) and "without what it held" in str(error)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(error.pid).wait(10)


@pytest.mark.slow
def test_an_error_in_a_stage_is_nobodys_death() -> None:
    with pytest.raises(StageError, match=r"scorer/0.score raised ValueError: this is bad"):
        run("ray", {"scorer": Fault("raise", prompts(1, 12)[5])})


@pytest.mark.slow
def test_a_worker_killed_between_steps_is_replaced(undisturbed: list[Any]) -> None:
    shared_ray()
    with Cluster(CONFIG, "ray") as cluster:
        groups = launch(cluster, {})
        results = [run_step(cluster, groups, 1)[-1].result]
        (pid,) = groups[1].pid().result(60)
        os.kill(pid, signal.SIGKILL)
        results.append(run_step(cluster, groups, 2)[-1].result)
    assert results == undisturbed

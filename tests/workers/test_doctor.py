"""What rlinf-doctor says of a machine, and of one that lacks something."""

import json
import socket

import pytest
from packaging.requirements import Requirement

from rlinf.workers.doctor import examine, judge, judge_machine, main, render, requirements


def test_this_machine_can_run_everything_that_is_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = examine()
    assert {row.area for row in found} >= {"machine", "packages", "transports", "ray"}
    assert [row for row in found if row.state == "broken" and row.area != "optional"] == []
    assert main(["--json"]) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert {"Python", "torch", "shm", "rlinf-workers"} <= names


def test_each_requirement_knows_its_extra() -> None:
    found = {requirement.name: extra for requirement, extra in requirements("rlinf-workers")}
    assert found["torch"] == "" and found["math-verify"] == "math"


@pytest.mark.parametrize(
    ("extra", "installed", "state", "remedy"),
    [
        ("", "2.13.0+cpu", "ok", ""),
        ("", None, "broken", "pip install 'torch>=2.6'"),
        ("", "2.1.0", "broken", "pip install 'torch>=2.6'"),
        ("fast", None, "absent", "pip install 'rlinf-workers[fast]'"),
        ("fast", "2.1.0", "broken", "pip install 'torch>=2.6'"),
    ],
)
def test_a_requirement(extra: str, installed: str | None, state: str, remedy: str) -> None:
    finding = judge("rlinf-workers", Requirement("torch>=2.6"), extra, installed)
    assert (finding.state, finding.remedy) == (state, remedy)


def test_a_small_machine_is_told_what_it_lacks() -> None:
    found = judge_machine(cores=2, free_bytes=1 << 30, files=256)
    text = render(found)
    assert [row.state for row in found] == ["ok", "broken", "broken"]
    assert "1.0 GiB free" in text and "-> ulimit -n 4096" in text
    assert text.endswith("2 to be mended")


def test_a_ray_cluster_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        there = examine(f"{host}:{port}")[-1]
    gone = examine(f"{host}:{port}")[-1]
    assert (there.state, gone.state) == ("ok", "broken")
    assert "ray start --head" in gone.remedy
    assert examine("nowhere")[-1].state == "broken"

"""The commands, run as a user runs them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.sched import Plan, Profiler, Record, TraceError, Workflow
from rlinf.sched.trace import load_trace, profiler_of, totals

WORKFLOW = """
batch: 64
devices: 8
components:
  rollout: {sizes: [1, 2, 4, 8], times: [[4, 64, 20], [8, 64, 14]]}
  train: {sizes: [1, 2, 4, 8], times: [[4, 64, 10], [8, 64, 5.2]]}
"""
TRACED = """
import time
from rlinf.sched import Profiler
profiler = Profiler()
with profiler.span("rollout", devices=2, items=4) as emit:
    for _ in range(4):
        emit()
profiler.save_trace()
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from rlinf.sched.cli import {program} as m; sys.exit(m())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def workflow(tmp_path: Path) -> str:
    path = tmp_path / "workflow.yaml"
    path.write_text(WORKFLOW)
    return str(path)


def test_plan_explain_simulate_compare(tmp_path: Path, workflow: str):
    plan = str(tmp_path / "plan.yaml")
    done = run("main", "plan", workflow, "--gpus", "4", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert len(Plan.load(plan).devices) == 4
    done = run("main", "explain", workflow, "--gpus", "4", "--json")
    assert json.loads(done.stdout)["bottleneck"] in ("rollout", "train")
    done = run("main", "explain", workflow, "--gpus", "2", "--plan", plan)
    assert done.returncode == 2 and "plan.yaml is for 4 devices" in done.stderr
    picture = str(tmp_path / "plan.html")
    done = run("main", "simulate", workflow, "--gpus", "4", "--plan", plan, "--draw", picture)
    assert "predicted" in done.stdout and Path(picture).exists(), done.stderr
    done = run("main", "compare", workflow, plan, "--gpus", "4", "--json")
    assert plan in json.loads(done.stdout)


def strict(text: str) -> dict[str, object]:
    """JSON as other languages read it, without Infinity and NaN."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_an_explanation_is_json_for_any_reader(workflow: str):
    done = run("main", "explain", workflow, "--json")
    flips = strict(done.stdout)["flips"]
    assert [flip["component"] for flip in flips] == ["rollout", "train"]
    assert any(flip["slower"] is None for flip in flips)


def test_a_plan_of_another_workflow_is_refused(tmp_path: Path, workflow: str):
    plan, other = str(tmp_path / "plan.yaml"), tmp_path / "other.yaml"
    assert run("main", "plan", workflow, "-o", plan).returncode == 0
    other.write_text(WORKFLOW + "  score: {times: [[8, 64, 1]]}\n")
    for arguments in (("explain", "--plan"), ("simulate", "--plan"), ("compare",)):
        done = run("main", arguments[0], str(other), *arguments[1:], plan)
        assert done.returncode == 2 and "lacks score" in done.stderr, done.stdout
    other.write_text(WORKFLOW.replace("batch: 64", "batch: 32"))
    done = run("main", "compare", str(other), plan)
    assert done.returncode == 2 and "is for batch 64, not 32" in done.stderr


def test_a_plan_is_explained_for_its_own_batch_and_devices(tmp_path: Path, workflow: str):
    plan, other = str(tmp_path / "plan.yaml"), tmp_path / "other.yaml"
    assert run("main", "plan", workflow, "-o", plan).returncode == 0
    other.write_text(WORKFLOW.replace("batch: 64", "batch: 32").replace("devices: 8", "devices: 4"))
    found = strict(run("main", "explain", str(other), "--plan", plan, "--json").stdout)
    assert min(found["best_of_kind"].values()) == pytest.approx(found["plan"]["seconds"])


def test_output_that_nobody_reads_is_no_error(workflow: str):
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from rlinf.sched.cli import main; sys.exit(main())"
    for settings in ({}, {"PYTHONUNBUFFERED": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", workflow],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "", **settings},
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writer)


INTERRUPTED = """
import signal, sys, threading
from rlinf.sched.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
sys.exit(main())
"""
INTERRUPTED_AT_A_TERMINAL = """
import signal, sys
from rlinf.sched.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
write = sys.stderr.write
def interrupted(text):
    write(text)
    if "how far" in text:
        signal.raise_signal(signal.SIGINT)
sys.stderr.write, sys.stderr.isatty = interrupted, lambda: True
sys.exit(main())
"""


@pytest.mark.parametrize("code", [INTERRUPTED, INTERRUPTED_AT_A_TERMINAL])
def test_ctrl_c_ends_a_long_explanation_with_one_line(tmp_path: Path, code: str):
    times = {"times": [[1, 64, 100], [8, 64, 20], [64, 64, 5]]}
    count = 10 if code == INTERRUPTED else 2
    names = [f"c{i}" for i in range(count)]
    edges = [[a, b] for i, a in enumerate(names) for j, b in enumerate(names[:i]) if i * j % 3 == 1]
    data = {"batch": 64, "devices": 64, "components": dict.fromkeys(names, times), "edges": edges}
    (tmp_path / "wide.json").write_text(json.dumps(data))
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", str(tmp_path / "wide.json")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130 and not done.stdout
    assert done.stderr.rpartition("\033[K")[2] == "rlinf-sched: interrupted\n"


REALITY = """
engines:
  rollout:
    lengths: {median: 1000, sigma: 0.8, most: 8000}
    group: 4
    tool_s: 1.0
"""


def test_a_plan_is_simulated_with_lengths_and_tools(tmp_path: Path, workflow: str):
    reality, trace = tmp_path / "reality.yaml", tmp_path / "run.json"
    reality.write_text(REALITY)
    arguments = ("simulate", workflow, "--reality", str(reality), "--iterations", "3", "--json")
    done = run("main", *arguments, "--draw", str(trace))
    assert done.returncode == 0, done.stderr
    tools = json.loads(done.stdout)["simulated_s"]
    assert len(set(tools)) == 3 and json.loads(trace.read_text())["traceEvents"]
    reality.write_text(REALITY.replace("tool_s: 1.0", "tool_s: 0").replace("0.8", "0"))
    even = json.loads(run("main", *arguments).stdout)["simulated_s"]
    assert max(even) < min(tools) and max(even) == pytest.approx(min(even))
    again = run("main", *arguments, "--jitter", "0.2")
    assert len(set(json.loads(again.stdout)["simulated_s"])) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: {train: {lengths: []}}", "engines.train.lengths: needs at least one length"),
        ("engines: {train: {slots: 4}}", "engines.train: missing key 'lengths'"),
        ("jiter: 1", "jiter: unknown key; did you mean 'jitter'?"),
        ("engines: {roll: {lengths: [5]}}", "engine 'roll' is no component of the plan"),
        ("engines: {train: {lengths: {median: 0, sigma: 1}}}", "lengths.median: must be at least"),
    ],
)
def test_a_wrong_reality_is_named(tmp_path: Path, workflow: str, text: str, message: str):
    (tmp_path / "reality.yaml").write_text(text)
    done = run("main", "simulate", workflow, "--reality", str(tmp_path / "reality.yaml"))
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["plan", "simulate", "explain", "compare", "replay"])
def test_the_help_of_every_command_has_an_example(command: str):
    done = run("main", command, "--help")
    assert f"example:\n  rlinf-sched {command} workflow.yaml" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("plan", "WORKFLOW", "--gpus", "0"), "--gpus must be positive"),
        (("simulate", "WORKFLOW", "--draw", "x.gif"), "know .png, .html, .json"),
        (("simulate", "WORKFLOW", "--draw", "/nowhere/x.html"), "/nowhere/x.html: No such file"),
        (("simulate", "WORKFLOW", "--jitter", "nan"), "must be a number of 0 or more"),
        (("plan", "WORKFLOW", "--robust", "1000"), "must be at most 1"),
        (("plan", "WORKFLOW", "--output", "."), "is a folder, cannot be written"),
    ],
)
def test_mistakes_end_with_a_message(workflow: str, arguments: tuple[str, ...], message: str):
    done = run("main", *(workflow if a == "WORKFLOW" else a for a in arguments))
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_command_is_traced_and_reported(tmp_path: Path):
    folder = str(tmp_path / "trace")
    command = ("--trace", "worker_communication", "--output", folder, "--", sys.executable, "-c")
    done = run("profiler_main", *command, TRACED)
    assert done.returncode == 0, done.stderr
    assert "worker: rollout" in done.stdout and "busy:" in done.stdout
    with gzip.open(Path(folder) / "perfetto.json.gz", "rt") as file:
        rows = json.load(file)["traceEvents"]
    assert {type(row["pid"]) for row in rows} == {int}
    assert [row["name"] for row in rows] == ["rollout", "process_name", "thread_name"]
    report = run("profiler_main", "report", folder, "--json")
    assert json.loads(report.stdout)["totals"][0]["name"] == "rollout"
    failed = run("profiler_main", *command, TRACED + "raise SystemExit(3)")
    assert failed.returncode == 3


def test_a_program_that_traces_nothing_is_an_error():
    done = run("profiler_main", "--trace", "flow", "--", sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert "the program wrote none" in done.stderr


def test_a_kind_that_is_not_known_is_named():
    done = run("profiler_main", "--trace", "worker", "--", sys.executable, "-c", "pass")
    assert done.returncode == 2 and "worker_communication" in done.stderr


def test_records_become_a_profile_and_a_trace(tmp_path: Path):
    profiler = Profiler()
    for k, seconds in enumerate((9.0, 4.0, 4.2)):
        emitted = (0.25 * seconds, 0.5 * seconds, 0.5 * seconds, seconds)
        profiler.record(Record("rollout", 8, 64, float(10 * k), seconds, emitted))
    entry = profiler.profile(skip=1)["rollout"]
    assert [sample.seconds for sample in entry.samples] == [4.0, 4.2]
    assert entry.emitted(4, 8) == pytest.approx([0.25, 0.5, 0.5, 1.0])
    assert profiler.save_trace() is None or "RLINF_TRACE" in os.environ
    file = profiler.save_trace(tmp_path / "trace.json")
    spans = load_trace(file)
    assert totals(spans)[0].seconds == pytest.approx(17.2)
    again = profiler_of(spans).profile()["rollout"]
    assert sorted(s.seconds for s in again.samples) == pytest.approx([4.0, 4.2, 9.0])


def recorded(path: Path, factor: float) -> Path:
    """80 iterations of the workflow above; from the 30th on the rollout is ``factor`` as long."""
    profiler = Profiler()
    for k in range(80):
        rollout = 14 * (factor if k >= 30 else 1.0)
        profiler.record(Record("rollout", 8, 64, 100.0 * k, rollout, (rollout / 2, rollout)))
        for half in (0, 1):
            start = 100.0 * k + rollout + 2.6 * half
            profiler.record(Record("train", 8, 32, start, 2.6))
    found = profiler.save_trace(path)
    assert found is not None
    return found


def test_a_recorded_run_is_replayed(tmp_path: Path, workflow: str):
    trace = str(recorded(tmp_path / "trace.json", 3.0))
    done = run("main", "replay", workflow, trace, "--rule", "deviation", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [r["iteration"] for r in found["replans"]] == [37]
    assert found["replans"][0]["factors"] == pytest.approx({"rollout": 3.0, "train": 1.0})
    assert found["seconds"] >= found["oracle_s"]
    done = run("main", "replay", workflow, trace)
    assert "above the best plan in every iteration" in done.stdout, done.stderr
    other = Profiler()
    other.record(Record("rollout", 8, 64, 0.0, 14.0))
    other.save_trace(tmp_path / "half.json")
    done = run("main", "replay", workflow, str(tmp_path / "half.json"))
    assert done.returncode == 2 and "no runs of 'train'" in done.stderr


def test_a_recorded_run_becomes_a_workflow(tmp_path: Path):
    trace = str(recorded(tmp_path / "trace.json", 1.0))
    file = str(tmp_path / "found.yaml")
    assert run("profiler_main", "report", trace, "--workflow", file).returncode == 0
    done = run("main", "plan", file, "--json")
    assert done.returncode == 0, done.stderr
    found = Workflow.load(file)
    assert found.graph.edges == (("rollout", "train"),)
    assert (found.batch, len(found.devices)) == (64, 8)
    assert found.profile["rollout"].emitted(2, 8) == pytest.approx([0.5, 1.0])


def test_a_file_that_is_no_trace_is_named(tmp_path: Path):
    for text, reason in (("{", "not JSON"), ("3", "not a Chrome trace")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(TraceError, match=reason):
            load_trace(tmp_path / "x.json")

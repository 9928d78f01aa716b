"""What the profiler says of a flow: shares, what would help, what differs between two runs."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.sched.activities import Activity, activities, iterations_s, length_s, shares
from rlinf.sched.improvements import Change, _Story, improvements
from rlinf.sched.report import comparison, figures
from rlinf.sched.trace import Span
from rlinf.sched.traffic import traffic


def chunk(worker: str, iteration: int, begin: float, work_s: float, **changes: object) -> Activity:
    usual = Activity(
        worker, worker.partition("/")[0], iteration, begin, work_s, 0.0, 0.0, 0.0, "", "", ()
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def in_turn(iterations: int) -> list[Activity]:
    """4 s of rollout, then 2 s of training on the same devices, then 1 s of the program."""
    found = []
    for n in range(iterations):
        start, channel = 7.0 * n, f"samples.{n}"
        out = {"output": channel, "emitted": (start + 2.0, start + 4.0)}
        found.append(chunk("rollout/0", n, start, 4.0, **out))
        found.append(
            chunk("trainer/0", n, start + 4, 2.0, input=channel, waited_s=2.0, locked_s=2.0)
        )
    return found


def test_what_would_help_a_flow_in_turns() -> None:
    found = in_turn(4)
    assert iterations_s(found) == [6.0, 7.0, 7.0, 7.0] and length_s(found) == 27.0
    first, second, third = improvements(found)
    assert (first.text.partition(" ")[0], first.gain_s) == ("rollout", 2.0)
    assert first.share == pytest.approx(8 / 27)
    assert (second.text.partition(" ")[0], second.gain_s) == ("trainer", 1.0)
    assert third.text.startswith("nothing between stages") and third.gain_s == pytest.approx(0.75)


def test_side_by_side_helps_where_outputs_come_early() -> None:
    """Half of the samples are there after 2 s: training on them need not wait for the rest."""
    found = []
    for n in range(3):
        start, channel = 6.0 * n, f"s.{n}"
        out = {"output": channel, "emitted": (start + 1.0, start + 4.0)}
        found.append(chunk("rollout/0", n, start, 4.0, **out))
        found.append(chunk("trainer/0", n, start + 4, 1.0, input=channel, locked_s=3.0))
        found.append(chunk("trainer/0", n, start + 5, 1.0, input=channel))
    listed = {one.text.partition(":")[0]: one.gain_s for one in improvements(found, 9)}
    assert listed["rollout twice as fast"] == 2.0
    assert 0 < listed.get("no turns", 0.0) <= 2.0 or "no turns" not in listed


def test_uneven_workers_and_loading_are_named() -> None:
    found = []
    for n in range(2):
        found.append(chunk("r/0", n, 10.0 * n, 8.0, output=f"c.{n}", emitted=(10.0 * n + 8,)))
        found.append(chunk("r/1", n, 10.0 * n, 2.0, output=f"c.{n}", emitted=(10.0 * n + 2,)))
        found.append(chunk("t/0", n, 10.0 * n + 8, 1.0, load_s=1.0, input=f"c.{n}", waited_s=8.0))
    listed = {one.text: one.gain_s for one in improvements(found, 9)}
    assert listed["r: the same work for each of its workers"] == 3.0
    assert listed["state stays on the devices: nothing is loaded and freed"] == 1.0


def story(seed: int) -> list[Activity]:
    """Any chunks: workers do one thing at a time, and take what is out."""
    draw = random.Random(seed)
    free: dict[str, float] = {}
    found = []
    for n in range(draw.randint(1, 12)):
        worker = draw.choice(["a/0", "a/1", "b/0"])
        begin = free.get(worker, 0.0) + draw.choice([0.0, 5 * draw.random()])
        work_s, load_s = draw.uniform(0.01, 5), draw.choice([0.0, 0.5])
        free[worker] = begin + work_s + load_s
        out = {"output": "c", "emitted": (begin + draw.uniform(0, 1.2 * work_s),)}
        extra = out if worker[0] == "a" else {"input": "c"}
        locked_s = draw.choice([0.0, 1.0])
        found.append(
            chunk(worker, n // 3, begin, work_s, load_s=load_s, locked_s=locked_s, **extra)
        )
    return sorted(found, key=lambda one: one.begin)


CHANGES = [
    Change(work=dict.fromkeys(range(12), 0.5)),
    Change(loading=False),
    Change(turns=False),
    Change(control=False),
]


def test_unchanged_the_replay_is_the_trace_and_less_work_never_takes_longer() -> None:
    for seed in range(300):
        found = story(seed)
        told = _Story(found)
        whole = told.seconds(Change())
        assert whole == pytest.approx(length_s(found)), seed
        for change in CHANGES:
            assert told.seconds(change) <= whole + 1e-9, (seed, change)
        assert all(one.gain_s >= 0 for one in improvements(found)), seed


def test_shares_of_a_worker() -> None:
    [rollout, trainer] = shares(in_turn(1))
    assert (rollout.works, rollout.idle) == (pytest.approx(4 / 6), pytest.approx(2 / 6))
    assert trainer.waits_for_devices == trainer.waits_for_items == trainer.works


def span(one: Activity) -> Span:
    arguments = {"iteration": one.iteration, "input": one.input, "output": one.output}
    arguments |= {"waited_s": one.waited_s, "locked_s": one.locked_s}
    emitted = tuple(time - one.begin for time in one.emitted)
    return Span(
        one.name,
        "stage",
        one.worker,
        one.begin,
        one.work_s,
        worker=one.worker,
        emitted=emitted,
        arguments=arguments,
    )


def sent(sender: str, receiver: str, nbytes: int, **arguments: str) -> Span:
    name = "Connected" if arguments else f"send message to {receiver}"
    told = {"peer": receiver, **arguments}
    return Span(name, "comm", sender, 0.0, 0.0, nbytes, process=sender, arguments=told)


def test_spans_of_a_flow_are_its_activities() -> None:
    assert list(activities([span(one) for one in in_turn(2)])) == in_turn(2)


def test_who_sent_how_much_over_what() -> None:
    spans = [
        sent("a/0", "b/0", 0, transport="shm"),
        sent("a/0", "b/0", 5),
        sent("b/0", "a/0", 9),
        sent("a/0", "c/0", 1),
        sent("a/0", "b/0", 5),
    ]
    rows = [(t.sender, t.receiver, t.transport, t.messages, t.nbytes) for t in traffic(spans)]
    assert rows == [
        ("a/0", "b/0", "shm", 2, 10),
        ("b/0", "a/0", "shm", 1, 9),
        ("a/0", "c/0", "", 1, 1),
    ]


def test_two_runs_are_compared() -> None:
    slow = [span(one) for one in in_turn(4)]
    quick = [
        replace(one, seconds=one.seconds / 2) if one.name == "rollout" else one for one in slow
    ]
    before = figures([*slow, sent("a/0", "b/0", 8_000_000)])
    after = figures(quick)
    assert before["rollout works, s"] == 4.0 and after["rollout works, s"] == 2.0
    assert before["a/0 to b/0, MB"] == 2.0
    lines = comparison(before, after).splitlines()
    assert lines[1].split()[:2] == ["iteration,", "s"]
    assert lines[2].split() == ["rollout", "works,", "s", "4.000", "2.000", "-2.000", "0.50", "x"]
    assert lines[-1].split()[-1] == "-2.000"


def test_the_command_compares_traces_of_any_program(tmp_path: Path) -> None:
    for name, seconds in (("before", 2.0), ("after", 3.0)):
        row = {"name": "work", "ph": "X", "ts": 0, "dur": seconds * 1e6, "pid": 1, "tid": 1}
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
    code = "import sys; from rlinf.sched.cli import profiler_main as m; sys.exit(m())"
    command = [sys.executable, "-c", code, "compare", "before.json", "after.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].split() == [
        "work,",
        "s",
        "2.000",
        "3.000",
        "+1.000",
        "1.50",
        "x",
    ]

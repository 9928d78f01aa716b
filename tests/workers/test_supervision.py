"""The decisions of supervision, without a process: events in, commands out."""

import random

import pytest

from rlinf.workers.errors import StartError, StateLost, WorkerDied
from rlinf.workers.incidents import (
    Answered,
    Broke,
    Command,
    Died,
    Fail,
    Heard,
    Join,
    Kill,
    Launch,
    Ping,
    Release,
    Send,
    Started,
    Stop,
    Submit,
    Tick,
)
from rlinf.workers.supervision import Limits, Supervision

LIMITS = Limits(start_s=60.0, silence_s=30.0, heartbeat_s=2.0)


def running(*workers: str, restarts: int = 3) -> Supervision:
    core = Supervision(LIMITS)
    for pid, worker in enumerate(workers, start=100):
        assert core.step(Join(worker, restarts), 0.0) == [Launch(worker, 0)]
        core.step(Started(worker, 0, pid), 1.0)
    return core


def errors(commands: list[Command]) -> dict[int, Exception]:
    return {c.call: c.error for c in commands if isinstance(c, Fail)}


def test_calls_wait_for_the_start_and_keep_their_order() -> None:
    core = Supervision(LIMITS)
    core.step(Join("a/0", 0), 0.0)
    assert core.step(Submit("a/0", 1), 0.1) == []
    assert core.step(Submit("a/0", 2), 0.2) == []
    assert core.step(Started("a/0", 0, 7), 1.0) == [Send("a/0", 0, 1), Send("a/0", 0, 2)]
    assert core.step(Submit("a/0", 3), 1.1) == [Send("a/0", 0, 3)]
    assert core.step(Answered("a/0", 0, 1), 1.2) == [Release(1)]
    assert core.step(Answered("a/0", 0, 1), 1.3) == []


def test_unanswered_calls_go_to_the_next_incarnation() -> None:
    core = running("a/0")
    core.step(Submit("a/0", 1), 1.0)
    core.step(Submit("a/0", 2), 1.0)
    core.step(Answered("a/0", 0, 1), 2.0)
    assert core.step(Died("a/0", 0, "killed"), 3.0) == [
        Kill("a/0", 0, "killed"),
        Launch("a/0", 1),
    ]
    assert core.step(Answered("a/0", 0, 2), 3.1) == [], "the dead one's answer comes too late"
    assert core.step(Died("a/0", 0, "lost"), 3.2) == [], "the same death is told twice"
    assert core.step(Started("a/0", 1, 8), 4.0) == [Send("a/0", 1, 2)]
    assert core.step(Answered("a/0", 1, 2), 5.0) == [Release(2)]


def test_a_late_loss_of_the_one_before_is_no_death_of_the_next() -> None:
    """It comes once the next was launched, once it runs, and once it was called."""
    core = Supervision(LIMITS)
    core.step(Join("a/0", 3), 0.0)
    core.step(Started("a/0", 0, 7, epoch=1), 1.0)
    core.step(Submit("a/0", 1), 2.0)
    assert Launch("a/0", 1) in core.step(Died("a/0", 0, "silent"), 3.0)
    late = Broke("a/0", 1, "its connection broke")
    assert core.step(late, 3.1) == []
    assert core.step(Started("a/0", 1, 8, epoch=2), 4.0) == [Send("a/0", 1, 1)]
    assert core.step(late, 4.1) == []
    assert core.is_running("a/0")
    assert Launch("a/0", 2) in core.step(Broke("a/0", 2, "its connection broke"), 5.0)


@pytest.mark.parametrize("seed", range(50))
def test_losses_told_in_any_order_count_once(seed: int) -> None:
    """Each incarnation dies once, which is told up to three times, now or at any later moment."""
    dice = random.Random(seed)
    core = Supervision(LIMITS)
    launched = core.step(Join("a/0", 1000), 0.0)
    told: list[Broke | Died] = []
    for k in range(30):
        assert launched == [Launch("a/0", k)]
        for late in told[:]:
            if dice.random() < 0.4:
                assert core.step(late, float(k)) == []
        core.step(Started("a/0", k, 100 + k, epoch=k + 1), float(k))
        core.step(Submit("a/0", k), float(k))
        core.step(Answered("a/0", k, k), float(k))
        for late in dice.sample(told, len(told)):
            assert core.step(late, float(k)) == []
        ends = [Broke("a/0", k + 1, "lost"), Broke("a/0", k + 1, "call"), Died("a/0", k, "killed")]
        dice.shuffle(ends)
        commands = core.step(ends[0], float(k))
        launched = [command for command in commands if isinstance(command, Launch)]
        told += ends[1:]


def test_a_worker_that_may_not_be_restarted_stops_the_job() -> None:
    core = running("rollout/0")
    core.step(Join("trainer/0", 0), 0.0)
    core.step(Started("trainer/0", 0, 4242), 1.0)
    core.step(Submit("rollout/0", 1), 2.0)
    core.step(Submit("trainer/0", 2), 2.0)
    commands = core.step(Died("trainer/0", 0, "signal 9"), 3.0)
    assert commands[0] == Kill("trainer/0", 0, "signal 9")
    assert isinstance(commands[-1], Stop)
    failed = errors(commands)
    assert failed.keys() == {1, 2}
    error = failed[1]
    assert isinstance(error, WorkerDied)
    assert error.worker == "trainer/0" and error.pid == 4242
    assert "trainer/0 (process 4242) died: signal 9" in str(error)
    assert errors(core.step(Submit("rollout/0", 3), 4.0)) == {3: error}, "later calls fail at once"
    assert core.step(Died("rollout/0", 0, "x"), 4.0) == []


def unit(restarts: int = 3) -> Supervision:
    """Two ranks that hold a state together, each with a call under way, and one that holds none."""
    core = Supervision(LIMITS)
    for pid, worker in enumerate(("t/0", "t/1", "a/0"), start=100):
        core.step(Join(worker, restarts, "t" if worker != "a/0" else ""), 0.0)
        core.step(Started(worker, 0, pid), 1.0)
        core.step(Submit(worker, pid), 1.0)
    return core


def test_those_that_hold_a_state_together_start_again_together() -> None:
    core = unit()
    commands = core.step(Died("t/1", 0, "killed"), 2.0)
    lost = errors(commands)[100]
    assert isinstance(lost, StateLost) and (lost.worker, lost.pid) == ("t/1", 101)
    assert commands == [
        Kill("t/1", 0, "killed"),
        Fail(100, lost),
        Kill("t/0", 0, "t/1 died"),
        Fail(101, lost),
        Launch("t/0", 1),
        Launch("t/1", 1),
    ]
    assert core.step(Died("t/0", 0, "killed by us"), 2.1) == [], "one death, told of its mate too"
    assert core.is_running("a/0"), "the others stay as they are"


def test_a_call_to_one_that_lost_its_state_fails_until_it_is_restored() -> None:
    core = unit()
    core.step(Died("t/1", 0, "killed"), 2.0)
    core.step(Started("t/0", 1, 200), 3.0)
    assert isinstance(errors(core.step(Submit("t/0", 1), 3.1))[1], StateLost)
    assert core.step(Submit("t/0", 2, restores=True), 3.2) == [Send("t/0", 1, 2)]
    assert core.step(Submit("t/0", 3), 3.3) == [Send("t/0", 1, 3)]
    assert errors(core.step(Submit("t/1", 4), 3.4)).keys() == {4}, "each rank for itself"
    failed = errors(core.step(Died("t/0", 1, "again"), 4.0))
    assert failed.keys() == {2, 3}, "a restoring call is not sent to the next one by itself"
    assert errors(core.step(Submit("t/0", 5), 4.1)).keys() == {5}


def test_what_needs_no_state_is_sent_to_the_next_one() -> None:
    core = unit()
    core.step(Submit("t/0", 1, stateless=True), 1.5)
    assert errors(core.step(Died("t/1", 0, "killed"), 2.0)).keys() == {100, 101}
    assert core.step(Submit("t/0", 2, stateless=True), 2.1) == []
    assert core.step(Started("t/0", 1, 200), 3.0) == [Send("t/0", 1, 1), Send("t/0", 1, 2)]


def test_one_that_holds_state_may_die_only_so_often_before_it_answers() -> None:
    core = unit(restarts=1)
    core.step(Died("t/1", 0, "x"), 2.0)
    commands = core.step(Died("t/1", 1, "x"), 3.0)
    assert isinstance(commands[-1], Stop) and "2 times in a row" in str(commands[-1].error)


def test_restarts_are_counted_in_a_row() -> None:
    core = running("a/0", restarts=2)
    for incarnation in range(6):  # a call done in between sets the count back
        core.step(Submit("a/0", incarnation), 0.0)
        core.step(Answered("a/0", incarnation, incarnation), 0.0)
        core.step(Died("a/0", incarnation, "x"), 0.0)
        core.step(Started("a/0", incarnation + 1, 1), 0.0)
    core.step(Submit("a/0", 99), 0.0)
    assert Launch("a/0", 7) in core.step(Died("a/0", 6, "x"), 0.0)
    commands = core.step(Died("a/0", 7, "x"), 0.0)
    assert isinstance(commands[-1], Stop)
    assert "3 times in a row" in str(errors(commands)[99])


def test_a_constructor_that_raises_is_not_tried_again() -> None:
    core = Supervision(LIMITS)
    core.step(Join("a/0", 3), 0.0)
    core.step(Submit("a/0", 1), 0.0)
    fault = StartError("a/0 could not be constructed: ValueError: no model", worker="a/0")
    commands = core.step(Died("a/0", 0, "constructor", fault), 1.0)
    assert errors(commands) == {1: fault} and commands[-1] == Stop(fault)


def test_a_constructor_that_raises_after_a_restart_is_tried_again() -> None:
    core = running("a/0", restarts=2)
    core.step(Died("a/0", 0, "killed"), 1.0)
    fault = StartError("a/0: no weights", worker="a/0", traceback="...")
    assert Launch("a/0", 2) in core.step(Died("a/0", 1, "a/0: no weights", fault), 2.0)
    commands = core.step(Died("a/0", 2, "a/0: no weights", fault), 3.0)
    assert isinstance(commands[-1], Stop) and isinstance(commands[-1].error, StartError)
    assert "no weights" in str(commands[-1].error)


def test_silence_is_death() -> None:
    core = running("a/0", "b/0")
    now = 1.0
    while now < 60.0:
        now += LIMITS.heartbeat_s
        commands = core.step(Tick(), now)
        core.step(Heard("b/0", 0), now)
        if any(isinstance(c, Kill) for c in commands):
            break
    assert now == pytest.approx(1.0 + LIMITS.silence_s, abs=2 * LIMITS.heartbeat_s)
    kill = next(c for c in commands if isinstance(c, Kill))
    assert kill.worker == "a/0" and "no sign of life for 30 s" in kill.cause
    assert Launch("a/0", 1) in commands
    assert Ping("b/0", 0) in commands


def test_our_own_pause_is_not_their_silence() -> None:
    core = running("a/0")
    core.step(Tick(), 2.0)
    commands = core.step(Tick(), 500.0)
    assert not any(isinstance(c, Kill) for c in commands)


def test_a_start_has_a_deadline() -> None:
    core = Supervision(LIMITS)
    core.step(Join("a/0", 0), 0.0)
    core.step(Submit("a/0", 1), 0.0)
    for now in range(0, 61, 2):
        assert core.step(Tick(), float(now)) == []
    commands = core.step(Tick(), 62.0)
    assert "did not start within 60 s" in str(errors(commands)[1])


@pytest.mark.parametrize("seed", range(300))
def test_random_faults_lose_and_repeat_no_answer(seed: int) -> None:
    """Whatever dies when: each call is released or failed exactly once, in order of submission."""
    random_ = random.Random(seed)
    core = Supervision(LIMITS)
    workers = [f"w/{i}" for i in range(3)]
    inbox: dict[tuple[str, int], list[int]] = {}
    launched: dict[str, int] = {}
    done: list[int] = []
    failed: list[int] = []
    submitted: dict[str, list[int]] = {w: [] for w in workers}
    now = 0.0

    def carry_out(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Launch):
                assert launched.get(command.worker, -1) == command.incarnation - 1
                launched[command.worker] = command.incarnation
                inbox[command.worker, command.incarnation] = []
            elif isinstance(command, Send):
                inbox[command.worker, command.incarnation].append(command.call)
            elif isinstance(command, Release):
                done.append(command.call)
            elif isinstance(command, Fail):
                failed.append(command.call)

    for worker in workers:
        carry_out(core.step(Join(worker, random_.choice([0, 2, 50])), now))
    for call in range(60):
        now += random_.random() * 3
        worker = random_.choice(workers)
        incarnation = max(0, launched[worker] - random_.choice([0, 0, 0, 1]))
        kind = random_.random()
        if kind < 0.35:
            submitted[worker].append(call)
            carry_out(core.step(Submit(worker, call), now))
        elif kind < 0.55:
            if not core.stopped and not core.is_running(worker):
                carry_out(core.step(Started(worker, launched[worker], 1), now))
        elif kind < 0.8 and inbox[worker, incarnation]:
            answer = inbox[worker, incarnation].pop(0)
            carry_out(core.step(Answered(worker, incarnation, answer), now))
        elif kind < 0.9:
            carry_out(core.step(Died(worker, incarnation, "x"), now))
        else:
            carry_out(core.step(Tick(), now))
            carry_out(core.step(Heard(worker, incarnation), now))
    for _ in range(3):  # let everything come to its end
        for worker in workers:
            if not core.stopped and not core.is_running(worker):
                carry_out(core.step(Started(worker, launched[worker], 1), now))
            queue = inbox[worker, launched[worker]]
            while queue:
                carry_out(core.step(Answered(worker, launched[worker], queue.pop(0)), now))
    everything = sorted(call for calls in submitted.values() for call in calls)
    assert sorted(done + failed) == everything
    assert core.stopped is not None or not failed
    for calls in submitted.values():
        assert [call for call in done if call in calls] == [call for call in calls if call in done]


def test_one_that_leaves_does_what_it_was_asked_before() -> None:
    core = Supervision(Limits())
    core.step(Join("w/0", restarts=3), 0.0)
    core.step(Started("w/0", 0, pid=1), 0.0)
    core.step(Submit("w/0", 1), 0.0)
    assert core.step(Submit("w/0", 2, stateless=True, leaves=True), 0.0) == [Send("w/0", 0, 2)]
    [refused] = core.step(Submit("w/0", 3), 0.0)
    assert isinstance(refused, Fail) and "has left its group" in str(refused.error)
    assert Launch("w/0", 1) in core.step(Died("w/0", 0, "killed"), 1.0)
    assert core.step(Started("w/0", 1, pid=2), 2.0) == [
        Send("w/0", 1, 1),
        Send("w/0", 1, 2),
    ]
    assert core.step(Answered("w/0", 1, 1), 3.0) == [Release(1)]
    assert core.step(Answered("w/0", 1, 2), 3.0) == [Release(2)]
    assert core.statistics(0.0) == () and not core.is_running("w/0")
    assert core.step(Died("w/0", 1, "it ended by itself"), 4.0) == []
    assert core.step(Tick(), 500.0) == []


def test_one_that_dies_with_nothing_to_do_but_leave_has_left() -> None:
    core = Supervision(Limits())
    core.step(Join("w/0", restarts=3), 0.0)
    core.step(Submit("w/0", 1, leaves=True), 0.0)
    core.step(Started("w/0", 0, pid=1), 0.0)
    commands = core.step(Died("w/0", 0, "killed"), 1.0)
    assert [type(command) for command in commands] == [Kill, Release]
    assert core.statistics(1.0) == ()

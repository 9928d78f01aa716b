"""The state machine alone, and two of them against each other under seeded schedules."""

import random

import pytest

from rlinf.comm.handshake import Refusal
from rlinf.comm.lifecycle import (
    DEAD_AFTER_S,
    Accept,
    Dial,
    DialFailed,
    Down,
    Drop,
    Fail,
    Lifecycle,
    LinkLost,
    Phase,
    Ping,
    Proved,
    Refuse,
    Refused,
    Resolve,
    Resolved,
    RetryAt,
    RetryDue,
    Unresolved,
    Up,
    Wanted,
    Welcomed,
)


def dialling(*, first=True, link=7):
    machine = Lifecycle(first=first)
    assert machine.step(Wanted(), 0.0) == [Resolve(fresh=False)]
    assert machine.step(Resolved(3), 0.0) == [Dial(3)]
    machine.dialled(link)
    return machine


def up(*, first=True, link=7, epoch=3):
    machine = dialling(first=first, link=link)
    assert machine.step(Welcomed(link, epoch), 0.0) == [Up(link, epoch)]
    return machine


def test_a_connection_is_made_once_however_often_it_is_wanted():
    machine = up()
    assert machine.step(Wanted(), 0.0) == []
    assert machine.phase is Phase.UP


def test_a_peer_that_dials_is_accepted():
    machine = Lifecycle(first=True)
    assert machine.step(Proved(4, 9), 0.0) == [Accept(4), Up(4, 9)]


def test_of_two_dials_that_of_the_smaller_id_stays():
    smaller, larger = dialling(first=True), dialling(first=False, link=8)
    assert smaller.step(Proved(20, 3), 0.0) == [Refuse(20, Refusal.DUPLICATE)]
    assert larger.step(Proved(21, 3), 0.0) == [
        Drop(8, "the peer's own connection goes first"),
        Accept(21),
        Up(21, 3),
    ]


def test_who_is_refused_for_a_duplicate_waits_and_tries_again():
    machine = dialling(first=False)
    (retry,) = machine.step(Refused(7, Refusal.DUPLICATE, "there is one"), 1.0)
    assert isinstance(retry, RetryAt)
    assert retry.when > 1.0
    assert machine.step(RetryDue(), retry.when) == [Resolve(fresh=True)]


def test_the_other_connection_may_come_while_waiting():
    machine = dialling(first=False)
    machine.step(Refused(7, Refusal.DUPLICATE, ""), 1.0)
    assert machine.step(Proved(9, 3), 1.01) == [Accept(9), Up(9, 3)]
    assert machine.step(RetryDue(), 1.02) == []


def test_a_second_connection_of_the_same_incarnation_is_refused_and_the_first_is_probed():
    machine = up()
    assert machine.step(Proved(9, 3), 0.0) == [Refuse(9, Refusal.DUPLICATE), Ping(7)]


def test_a_new_incarnation_replaces_the_old():
    machine = up(epoch=3)
    commands = machine.step(Proved(9, 4), 0.0)
    assert isinstance(commands[0], Drop)
    assert isinstance(commands[1], Down)
    assert commands[1].epoch == 3
    assert commands[2:] == [Accept(9), Up(9, 4)]


def test_an_old_incarnation_is_refused():
    machine = up(epoch=3)
    assert machine.step(Proved(9, 2), 0.0) == [Refuse(9, Refusal.STALE)]


def test_a_dial_that_keeps_failing_fails_what_waits():
    machine = dialling()
    now = 0.0
    for _ in range(100):
        (command,) = machine.step(DialFailed(0, OSError("refused")), now)
        if isinstance(command, Fail):
            break
        assert isinstance(command, RetryAt)
        now = command.when
        machine.step(RetryDue(), now)
        machine.step(Resolved(3), now)
    assert isinstance(command, Fail)
    assert DEAD_AFTER_S <= now < 2.0
    assert machine.step(Wanted(), now) == [Resolve(fresh=False)]


@pytest.mark.parametrize("code", [Refusal.VERSION, Refusal.TOKEN, Refusal.STALE])
def test_a_final_refusal_is_not_tried_again(code):
    assert dialling().step(Refused(7, code, "no"), 0.0) == [Fail("no")]


def test_an_unknown_peer_fails_what_waits():
    machine = Lifecycle(first=True)
    machine.step(Wanted(), 0.0)
    error = LookupError("who?")
    assert machine.step(Unresolved(error), 0.0) == [Fail(str(error), error)]
    assert machine.phase is Phase.ABSENT


def test_a_link_that_is_lost_is_made_again_on_demand():
    machine = up()
    assert machine.step(LinkLost(7, "reset", clean=False), 1.0) == [Down(3, "reset", False, False)]
    assert machine.step(LinkLost(7, "reset", clean=False), 1.0) == []
    assert machine.step(Wanted(), 2.0) == [Resolve(fresh=False)]


def test_an_answer_to_a_dial_that_was_given_up_is_dropped():
    machine = up()
    assert machine.step(Welcomed(99, 3), 0.0) == [Drop(99, "no longer wanted")]
    assert machine.step(DialFailed(99, OSError()), 0.0) == []


class Wire:
    """Two machines, and events under way between them in random order."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.machines = {"a": Lifecycle(first=True), "b": Lifecycle(first=False)}
        self.flying = []
        self.links = {}
        self.up = {"a": 0, "b": 0}
        self.now = 0.0
        self.next = 1

    def other(self, side):
        return "b" if side == "a" else "a"

    def fly(self, side, event):
        self.flying.append((side, event))

    def step(self, side, event):
        for command in self.machines[side].step(event, self.now):
            self.carry_out(side, command)

    def carry_out(self, side, command):
        match command:
            case Resolve():
                self.fly(side, Resolved(1))
            case Dial():
                link, self.next = self.next, self.next + 1
                self.links[link] = side
                self.machines[side].dialled(link)
                if self.random.random() < 0.2:
                    self.fly(side, DialFailed(link, OSError("refused")))
                    del self.links[link]
                else:
                    self.fly(self.other(side), Proved(link, 1))
            case Accept(link):
                self.fly(self.other(side), Welcomed(link, 1))
            case Refuse(link, code):
                self.links.pop(link, None)
                self.fly(self.other(side), Refused(link, code, ""))
            case Drop(link):
                if self.links.pop(link, None):
                    self.fly(self.other(side), LinkLost(link, "dropped", clean=False))
            case RetryAt():
                self.fly(side, RetryDue())
            case Up(link, _):
                self.up[side] = link
            case Down() | Fail():
                self.up[side] = 0
                self.fly(side, Wanted())

    def run(self):
        for _ in range(2000):
            if not self.flying:
                return
            self.now += 0.001
            side, event = self.flying.pop(self.random.randrange(len(self.flying)))
            self.step(side, event)


@pytest.mark.parametrize("seed", range(200))
def test_two_sides_that_dial_at_once_end_with_one_connection(seed):
    wire = Wire(seed)
    wire.fly("a", Wanted())
    wire.fly("b", Wanted())
    wire.run()
    assert not wire.flying
    assert wire.up["a"] == wire.up["b"] != 0
    assert wire.machines["a"].phase is wire.machines["b"].phase is Phase.UP

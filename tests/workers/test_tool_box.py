"""Calls of tools that answer, hang, raise, answer nonsense or die."""

import threading

import pytest

from rlinf.workers.roles import Tool, ToolFailed
from rlinf.workers.tools.box import ToolBox, ToolConfig

QUICK = ToolConfig(deadline_s=10.0, tries=3, pause_s=0.01)


class Echo:
    """Answers with what it was asked; keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def call(self, arguments, timeout_s):
        self.asked.append(list(arguments))
        return [f"about {argument}" for argument in arguments]


class Failing(Echo):
    """Fails so often before it answers."""

    def __init__(self, times, error):
        super().__init__()
        self.times, self.error = times, error

    def call(self, arguments, timeout_s):
        answers = super().call(arguments, timeout_s)
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return answers


class Hanging(Echo):
    """Hangs on some arguments until it is let go."""

    def __init__(self, on):
        super().__init__()
        self.on, self.gate, self.entered = on, threading.Event(), threading.Event()

    def call(self, arguments, timeout_s):
        if self.on & set(arguments):
            self.entered.set()
            self.gate.wait(60)
        return super().call(arguments, timeout_s)


def outcomes(box, numbers):
    """The observation of each call."""
    found = {}
    while len(found) < len(numbers):
        arrived = dict(box.collect(30.0))
        assert arrived, "nothing came"
        found |= arrived
    return [found[number] for number in numbers]


def ask(box, *arguments):
    return outcomes(box, [box.submit("search", argument) for argument in arguments])


def test_calls_are_answered_each_its_own():
    echo = Echo()
    assert isinstance(echo, Tool)
    with ToolBox({"search": echo}) as box:
        found = ask(box, *"abcdefgh")
        assert [o.text for o in found] == [f"about {c}" for c in "abcdefgh"]
        assert {(o.status, o.tries) for o in found} == {("ok", 1)}
        assert box.statistics().calls == 8 and box.statistics().failed == 0


def test_nothing_to_call_is_no_call_t12():
    echo = Echo()
    with ToolBox({"search": echo}) as box:
        assert box.collect(5.0) == [], "it does not wait for nothing"
    assert echo.asked == []


def test_what_waits_together_is_asked_together():
    hanging = Hanging({"first"})
    with ToolBox({"search": hanging}, ToolConfig(threads=1, batch=4)) as box:
        numbers = [box.submit("search", "first")]
        assert hanging.entered.wait(30)
        numbers += [box.submit("search", str(i)) for i in range(6)]
        hanging.gate.set()
        assert [o.status for o in outcomes(box, numbers)] == ["ok"] * 7
    assert [len(asked) for asked in hanging.asked] == [1, 4, 2]


def test_a_failure_is_tried_again():
    flaky = Failing(2, ToolFailed("status 500"))
    with ToolBox({"search": flaky}, QUICK) as box:
        [found] = ask(box, "a")
    assert (found.status, found.text, found.tries) == ("ok", "about a", 3)


def test_tries_are_bounded_and_the_model_is_told():
    dead = Failing(10**6, ToolFailed("no connection"))
    with ToolBox({"search": dead}, QUICK) as box:
        [found] = ask(box, "a")
        assert (found.status, found.tries) == ("failed", 3)
        assert found.text == "search failed: no connection"
        assert box.statistics().failed == 1
    assert len(dead.asked) == 3


def test_what_cannot_get_better_is_not_tried_again():
    refusing = Failing(10**6, ToolFailed("status 400", final=True))
    with ToolBox({"search": refusing}, QUICK) as box:
        [found] = ask(box, "a")
    assert (found.status, found.tries) == ("failed", 1)


def test_a_call_that_hangs_is_over_at_its_deadline_and_holds_up_nobody_t11():
    hanging = Hanging({"bad"})
    with ToolBox({"search": hanging}, ToolConfig(deadline_s=1.0, threads=2)) as box:
        bad = box.submit("search", "bad")
        assert hanging.entered.wait(30)
        good = box.submit("search", "good")
        [(first, answer)] = box.collect(30.0)
        assert (first, answer.text) == (good, "about good")
        [(second, late)] = box.collect(30.0)
        assert (second, late.status) == (bad, "failed")
        assert 1.0 <= late.seconds < 20.0
        assert box.statistics().late == 1
        hanging.gate.set()
        [after] = ask(box, "more")
        assert after.text == "about more", "an answer that comes too late is nobody's"


def test_when_all_threads_hang_calls_still_end():
    hanging = Hanging({"bad"})
    with ToolBox({"search": hanging}, ToolConfig(deadline_s=0.3, threads=1)) as box:
        found = ask(box, "bad", "good")
        assert [o.status for o in found] == ["failed", "failed"]
        hanging.gate.set()


def test_one_that_a_tool_cannot_digest_harms_no_other():
    class Picky(Echo):
        def call(self, arguments, timeout_s):
            if "poison" in arguments:
                raise ToolFailed("status 500")
            return super().call(arguments, timeout_s)

    with ToolBox({"search": Picky()}, QUICK) as box:
        found = ask(box, "a", "poison", "b")
    assert [o.status for o in found] == ["ok", "failed", "ok"]


@pytest.mark.parametrize("answers", [[], ["one"], ["a", "b", "c"]])
def test_a_wrong_number_of_answers_is_a_failure_t11(answers):
    class Short:
        def call(self, arguments, timeout_s):
            return answers if len(arguments) > 1 or len(answers) != 1 else []

    with ToolBox({"search": Short()}, QUICK) as box:
        found = ask(box, "a", "b")
    assert {o.status for o in found} == {"failed"}


def test_a_defect_of_a_plug_in_is_a_failure_and_not_shown_as_an_answer():
    broken = Failing(10**6, KeyError("contents"))
    with ToolBox({"search": broken}, QUICK) as box:
        [found] = ask(box, "a")
    assert (found.status, found.tries) == ("failed", 1)


def test_a_forgotten_call_is_never_heard_of():
    hanging = Hanging({"bad"})
    with ToolBox({"search": hanging}) as box:
        box.forget(box.submit("search", "bad"))
        hanging.gate.set()
        [found] = ask(box, "good")
        assert found.text == "about good"


def test_an_unknown_tool_is_named():
    with ToolBox({"search": Echo()}) as box, pytest.raises(KeyError, match="there are search"):
        box.submit("serach", "a")

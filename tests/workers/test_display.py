"""What is seen of a run where there is a terminal, where there is none, and where it went away."""

import io

from rich.console import Console

from rlinf.workers.display import display


def test_without_a_terminal_there_are_lines() -> None:
    stream = io.StringIO()
    lines = display(console=Console(file=stream, width=40), every_s=1e9)
    lines.start()
    lines.begin(3)
    lines.say("starting")
    lines.show(0, "")
    for step in (1, 2, 3):
        lines.show(step, f"reward {step}")
    lines.stop()
    assert stream.getvalue().splitlines() == [
        "starting",
        "step 1/3  reward 1",
        "step 3/3  reward 3",
    ]


def test_a_terminal_has_a_bar() -> None:
    stream = io.StringIO()
    bar = display(console=Console(file=stream, force_terminal=True, width=80))
    bar.start()
    bar.begin(2)
    bar.show(2, "reward 1")
    bar.stop()
    assert "2/2" in stream.getvalue() and "reward 1" in stream.getvalue()


def test_a_display_that_is_gone_is_silent() -> None:
    for terminal in (True, False):
        stream = io.StringIO()
        shown = display(console=Console(file=stream, force_terminal=terminal))
        stream.close()
        shown.start()
        shown.begin(2)
        shown.say("on")
        shown.show(2, "reward 1")
        shown.print("text")
        shown.stop()

import random

import pytest

from rlinf.comm.window import LETTER_BYTES, Window


def test_a_message_larger_than_the_window_goes_when_nothing_else_is_out():
    window = Window(1000)
    assert window.take(5000)
    assert not window.take(0)
    window.given += 5000 + LETTER_BYTES
    assert window.take(900)


@pytest.mark.parametrize("seed", range(50))
def test_a_sender_never_waits_for_credit_that_does_not_come(seed):
    """A sender that stands still asks; the receiver, once asked, tells at once."""
    chance = random.Random(seed)
    here, there = Window(10_000), Window(10_000)
    queued, to_send = [], [chance.randint(0, 12_000) for _ in range(300)]
    while to_send or queued:
        if to_send and here.take(to_send[0]):
            queued.append(to_send.pop(0))
            assert sum(queued) + LETTER_BYTES * len(queued) <= max(10_000, max(queued) + 64)
            continue
        if to_send:
            there.eager = True
            here.given += there.collect()
        if queued and there.consume(queued.pop(0)):
            here.given += there.collect()

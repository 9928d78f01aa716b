"""Thousands of random schedules of queue, policies, server and lock, each from its seed.

A test that cannot fail shows nothing: known faults are put into the machines, one at a time, and
the same schedules must find each of them.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from rlinf.channel import core, standstill, testing
from rlinf.channel.consumers import Consumer, Consumers
from rlinf.channel.core import Queue
from rlinf.channel.hub import Hub
from rlinf.channel.intake import Intake
from rlinf.channel.journal import ChannelState
from rlinf.channel.lane import Lanes
from rlinf.channel.lock_core import LockCore
from rlinf.channel.residents import Residents
from rlinf.channel.simulation.world import World
from rlinf.channel.spans import RunMap, Spans
from rlinf.channel.testing import Violation, check_channel, check_lock

SHORT, SMALL, LARGE, LOCKS = 2000, 1000, 60, 400
BLOCKS = 4


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_channel_schedule_loses_repeats_reorders_or_hangs(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, SHORT, BLOCKS):
        check_channel(seed, size=0)
    for seed in range(block, SMALL, BLOCKS):
        seen.update(check_channel(seed))
    for seed in range(block, LARGE, BLOCKS):
        seen.update(check_channel(seed, size=3))
    wanted = {
        "redelivered",
        "expired",
        "lost with their holder",
        "duplicates",
        "out items",
        "restarts",
        "dead items",
        "recalls",
        "standstills",
    }
    assert not wanted - {name for name, times in seen.items() if times}, "too tame to mean much"


def test_no_lock_schedule_grants_twice_or_hangs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(LOCKS):
        seen.update(check_lock(seed))
    assert min(seen["granted"], seen["denied"], seen["ended"], seen["restarts"]) > LOCKS / 4
    assert seen["stayed"] > LOCKS / 8


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_many_more_schedules(size: int, block: int) -> None:
    """Each within the limit for a test though the machine is busy with others."""
    count = 2000 // max(1, size) ** 2
    for seed in range(SHORT + block * count, SHORT + (block + 1) * count):
        check_channel(seed, size)
        check_lock(seed)


def test_a_seed_plays_the_same_schedule_again() -> None:
    first, second = World(11, 2), World(11, 2)
    for world in (first, second):
        testing.populate(world)
        world.run()
    assert str(first.story) == str(second.story)


# Faults: each replaces one method by one that is wrong in one way.


def forget_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated put is taken in again."""

    def line_up(self: Intake, producer: object, put: object) -> list[object]:
        producer.next = min(producer.next, put.first)  # type: ignore[attr-defined]
        return right(self, producer, put)  # type: ignore[arg-type,no-any-return]

    right = Intake._line_up
    monkeypatch.setattr(Intake, "_line_up", line_up)


def restore_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a consumer gives back is lost."""
    monkeypatch.setattr(Lanes, "restore", lambda self, items: None)


def never_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a silent consumer never runs out."""
    monkeypatch.setattr(Consumers, "expired", lambda self, now: [])


def keep_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The items of a dead consumer go to others while it is still said to hold them."""
    right = Consumers.take_back

    def take_back(self: Consumers, consumer: object, tags: object, now: float) -> object:
        runs, found = right(self, consumer, tags, now)  # type: ignore[arg-type]
        for run in runs[:1]:
            consumer.leased.add(found[0], run.copy())  # type: ignore[attr-defined]
        return runs, found

    monkeypatch.setattr(Consumers, "take_back", take_back)


def commit_without_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit puts its outputs and leaves its inputs as they are."""
    monkeypatch.setattr(Hub, "_settle", lambda self, commit, now: [])


def commit_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is not refused when its lease is lost."""
    monkeypatch.setattr(Queue, "missing", lambda self, consumer, tags: 0)
    monkeypatch.setattr(Hub, "_cancel_commits", lambda self, name, released, now: [])


def forget_the_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted server gives out again what was acknowledged."""
    monkeypatch.setattr(ChannelState, "finish", lambda self, record: None)


def forget_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted server does not know what its producers have put."""
    right = ChannelState.admit

    def admit(self: ChannelState, record: object) -> None:
        right(self, record)  # type: ignore[arg-type]
        self.producers.clear()

    monkeypatch.setattr(ChannelState, "admit", admit)


def record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server acknowledges what it has not written."""
    monkeypatch.setattr(Intake, "_record", lambda self, *_: None)


def forget_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for room is never told that its time is up."""
    monkeypatch.setattr(Intake, "expire", lambda self, now: [])


def forget_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are not looked at."""
    monkeypatch.setattr(Intake, "_fits", lambda self, item, lanes: True)


def wait_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put waits for room that nobody will make."""
    monkeypatch.setattr(Queue, "_refuse_in_vain", lambda self, commands, now: False)


def give_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put is said to wait in vain while somebody works on what he holds."""
    monkeypatch.setattr(standstill, "_blocked", lambda take, consumer: True)
    monkeypatch.setattr(core, "STANDSTILL_S", 0.0)


def settle_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who settles a part of what came together has settled all of it."""
    right = RunMap.cut

    def cut(self: RunMap, ranges: tuple[int, ...]) -> object:
        wide = Spans(ranges)
        for start, run in self:
            whole = start, start + run.count - 1
            if wide.common(whole):
                wide.update(whole)
        return right(self, wide.ranges())

    monkeypatch.setattr(RunMap, "cut", cut)


def never_bury(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that kills its consumers goes round for ever."""

    def restore(self: Queue, consumer: object, items: list[object]) -> list[object]:
        self._lanes.restore(items)  # type: ignore[arg-type]
        return []

    monkeypatch.setattr(Queue, "_restore", restore)


def take_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal gives back what its sender, who was stopped, has not seen yet."""
    right = Consumer.unknown_to

    def unknown_to(self: Consumer, tags: set[int], asks: object, before: float) -> list[int]:
        return right(self, tags, (), before)

    monkeypatch.setattr(Consumer, "unknown_to", unknown_to)


CHANNEL_FAULTS = [
    forget_repeats,
    take_what_is_on_its_way,
    restore_at_the_end,
    never_expire,
    keep_the_lost,
    commit_without_settling,
    commit_without_a_lease,
    forget_the_settled,
    forget_the_numbers,
    record_nothing,
    forget_deadlines,
    forget_bounds,
    wait_in_vain,
    give_up_early,
    settle_whole_runs,
    never_bury,
]


@pytest.mark.parametrize("fault", CHANNEL_FAULTS, ids=lambda fault: fault.__name__)
def test_the_schedules_find_a_fault_in_the_channel(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Violation) as caught:
        for seed in range(SMALL):
            check_channel(seed, size=1 + seed % 2)
    _tells_a_short_story(caught.value)


def _tells_a_short_story(violation: Violation) -> None:
    story = str(violation).splitlines()
    assert story[0].startswith("check_channel(") and 1 < len(story) < 60, "a short story"


NEED_MORE = {forget_bounds, wait_in_vain, give_up_early}
"""Where an item or two and one trouble are not enough."""


@pytest.mark.parametrize(
    "fault", [f for f in CHANNEL_FAULTS if f not in NEED_MORE], ids=lambda fault: fault.__name__
)
def test_the_shortest_schedules_find_most_faults(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Violation) as caught:
        for seed in range(SHORT):
            check_channel(seed, size=0)
    _tells_a_short_story(caught.value)


def grant_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted server does not know who holds what."""
    monkeypatch.setattr(LockCore, "load", lambda self, grants, now: None)


def take_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the flow is not kept."""
    line = LockCore._line
    monkeypatch.setattr(LockCore, "_line", lambda self: line(self)[::-1])


def hold_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grant of a silent holder never ends."""
    monkeypatch.setattr(LockCore, "_end", lambda self, grants, *, expired: [])


def crowd_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who stays on a device is asked to leave it."""
    monkeypatch.setattr(Residents, "in_the_way", lambda self, *_: [])


def believe_old_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says that it has left is taken to have left for good, though it has been back since."""
    monkeypatch.setattr(
        Residents, "leave", lambda self, token: self._known.clear() or self._asked.clear()
    )


@pytest.mark.parametrize(
    "fault",
    [grant_twice, take_by_parts, hold_for_ever, crowd_in, believe_old_news],
    ids=lambda fault: fault.__name__,
)
def test_the_schedules_find_a_fault_in_the_lock(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Violation, match=r"check_lock\(\d+\)"):
        for seed in range(LOCKS):
            check_lock(seed)

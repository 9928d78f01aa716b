"""Hundreds of random schedules of the queue, the policies and the lock, each from its seed."""

from collections import Counter

import pytest

from rlinf.channel import testing
from rlinf.channel.simulation import World
from rlinf.channel.testing import Violation, check_channel, check_lock

CHANNEL_SEEDS = 400
LOCK_SEEDS = 600
BLOCKS = 8


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_channel_schedule_loses_repeats_reorders_or_hangs(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, CHANNEL_SEEDS, BLOCKS):
        seen.update(check_channel(seed))
    missing = {"redelivered", "expired", "lost with their holder", "duplicates", "out items"}
    assert not missing - {name for name, times in seen.items() if times}, "too tame to mean much"


def test_no_lock_schedule_grants_twice_or_hangs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(LOCK_SEEDS):
        seen.update(check_lock(seed))
    assert min(seen["granted"], seen["denied"], seen["ended"]) > LOCK_SEEDS / 2


@pytest.mark.slow
def test_many_more_schedules() -> None:
    for seed in range(CHANNEL_SEEDS, 5000):
        check_channel(seed)
        check_lock(seed)


def test_a_seed_plays_the_same_schedule_again() -> None:
    first, second = World(11), World(11)
    for world in (first, second):
        testing.populate(world)
        world.run()
    assert first.story == second.story


def test_a_violation_tells_a_story() -> None:
    error = Violation("channel schedule 7: lost\n  0.1 put")
    assert "schedule 7" in str(error)

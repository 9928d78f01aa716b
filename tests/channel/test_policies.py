"""Balancing: what each policy chooses, and how well work is shared in the end."""

import heapq
import random
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from rlinf.channel.config import ChannelConfig
from rlinf.channel.core import Queue
from rlinf.channel.errors import PolicyUnknown
from rlinf.channel.messages import ClientId, Close, Delivered, Put, Take, Tick
from rlinf.channel.policy import (
    BUILT_IN,
    Adaptive,
    Choice,
    ConsumerLoad,
    ItemLoad,
    LeastLoaded,
    RoundRobin,
    Weighted,
    make_policy,
)
from tests.channel.driver import item

ONE = ItemLoad(1.0, 0.0)


def loads(*rows: tuple[str, float, bool, float]) -> list[ConsumerLoad]:
    return [ConsumerLoad(n, capacity, ready, out, 0.0) for n, capacity, ready, out in rows]


def test_round_robin_goes_round() -> None:
    policy = RoundRobin()
    three = loads(("a", 1, True, 0), ("b", 1, True, 0), ("c", 1, True, 0))
    assert [policy.choose(three, ONE).consumer for _ in range(6)] == list("abcabc")


def test_least_loaded_takes_the_least_loaded_that_is_ready() -> None:
    some = loads(("a", 1, True, 5), ("b", 1, True, 3), ("c", 1, False, 0))
    assert LeastLoaded().choose(some, ONE).consumer == "b"


def test_weighted_is_smooth() -> None:
    policy = Weighted()
    pair = loads(("big", 3, True, 0), ("small", 1, True, 0))
    chosen = [policy.choose(pair, ONE).consumer for _ in range(8)]
    assert chosen == ["big", "big", "small", "big"] * 2, "no bursts"


def test_weighted_counts_weight_not_items() -> None:
    policy, done = Weighted(), {"a": 0.0, "b": 0.0}
    pair = loads(("a", 1, True, 0), ("b", 1, True, 0))
    for weight in random.Random(0).choices([1.0, 9.0], k=400):
        done[policy.choose(pair, ItemLoad(weight, 0.0)).consumer] += weight
    assert max(done.values()) - min(done.values()) <= 9.0


def test_weighted_prefers_who_has_less_to_do_for_its_capacity() -> None:
    some = loads(("a", 1, True, 4), ("b", 4, True, 8))
    choice = Weighted().choose(some, ONE)
    assert choice.consumer == "b" and "least load" in choice.because


def test_adaptive_keeps_a_heavy_item_for_a_fast_consumer() -> None:
    policy = Adaptive()
    policy.completed("slow", 10.0, 10.0)
    policy.completed("fast", 100.0, 10.0)
    both = [ConsumerLoad("slow", 1, True, 0, 0), ConsumerLoad("fast", 1, False, 10.0, 0.5)]
    assert policy.choose(both, ItemLoad(100.0, 0.0)).consumer == "fast"
    assert policy.choose(both, ItemLoad(0.1, 0.0)).consumer == "slow"
    assert policy.choose(both, ItemLoad(100.0, 5000.0)).consumer == "slow", "there is enough to do"


def test_adaptive_does_not_wait_for_an_overdue_consumer() -> None:
    policy = Adaptive()
    policy.completed("slow", 1.0, 1.0)
    policy.completed("fast", 100.0, 1.0)
    overdue = [ConsumerLoad("slow", 1, True, 0, 0), ConsumerLoad("fast", 1, False, 10.0, 9.0)]
    assert policy.choose(overdue, ItemLoad(100.0, 0.0)).consumer == "slow"


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(PolicyUnknown, match="did you mean 'weighted'") as caught:
        make_policy("weigthed")
    assert caught.value.nearest == "weighted"


def test_every_choice_says_why() -> None:
    pair = loads(("a", 1, True, 0), ("b", 1, True, 2))
    for name in BUILT_IN:
        choice = make_policy(name).choose(pair, ONE)
        assert isinstance(choice, Choice) and choice.because


PLUGIN = """
from rlinf.channel import Choice

class LastOne:
    def choose(self, consumers, item):
        assert item.weight == 1.0
        return Choice([c for c in consumers if c.ready][-1].id, "it is the last")
    def completed(self, consumer, weight, seconds):
        pass
"""

PROGRAM = """
from rlinf.channel.policy import make_policy, ConsumerLoad, ItemLoad
policy = make_policy("last")
print(policy.choose([ConsumerLoad(n, 1.0, True, 0.0, 0.0) for n in "ab"], ItemLoad(1.0, 0.0)))
"""


def test_policies_plug_in_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "last_policy.py").write_text(PLUGIN)
    info = tmp_path / "last_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: last-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlinf.policies]\nlast = last_policy:LastOne\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "consumer='b'" in done.stdout, done.stderr


def makespan(policy: str, speeds: tuple[float, ...], weights: list[float]) -> float:
    """Virtual seconds until consumers of these speeds have worked off these weights."""
    queue = Queue("q", ChannelConfig(type=policy, lease_s=1e9))
    items = [item(number, weight) for number, weight in enumerate(weights)]
    numbers, now = count(1), 0.0
    queue.step(Put(next(numbers), ClientId("p/0", 1, 0), 0, items), now)
    queue.step(Close(), now)
    events: list[tuple[float, int, int]] = []
    ids = [ClientId(f"c/{i}", 1, 0) for i in range(len(speeds))]

    def obey(commands: list[object]) -> None:
        for command in commands:
            if isinstance(command, Delivered):
                who = ids.index(command.consumer)
                seconds = command.runs[0].weight / speeds[who]
                heapq.heappush(events, (now + seconds, who, command.first_tag))

    for who in ids:
        obey(queue.step(Take(next(numbers), who), now))
    while events:
        due = events[0][0]
        if queue.wake_at < due:
            now = max(now, queue.wake_at)
            obey(queue.step(Tick(), now))
            continue
        now, who, tag = heapq.heappop(events)
        obey(queue.step(Take(next(numbers), ids[who], done=(tag, tag)), now))
    assert queue.drained
    return now


def shuffled(seed: int) -> list[float]:
    weights = [float(w) for w in range(1, 101)]
    random.Random(seed).shuffle(weights)
    return weights


@pytest.mark.parametrize("speeds", [(1.0, 3.0), (1.0, 1.0), (1.0, 10.0), (1.0, 2.0, 3.0, 4.0)])
def test_adaptive_comes_near_the_fluid_optimum(speeds: tuple[float, ...]) -> None:
    for seed in range(20):
        weights = shuffled(seed)
        fluid = sum(weights) / sum(speeds)
        assert makespan("adaptive", speeds, weights) <= 1.05 * fluid, seed


def test_adaptive_beats_static_assignment() -> None:
    for seed in range(20):
        weights = shuffled(seed)
        static = max(sum(weights[::2]) / 1.0, sum(weights[1::2]) / 3.0)
        assert static / makespan("adaptive", (1.0, 3.0), weights) >= 1.23, seed


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_no_policy_leaves_anybody_idle_for_long(policy: str) -> None:
    weights = random.Random(3).choices([1.0, 5.0, 20.0], k=200)
    fluid = sum(weights) / 4.0
    assert makespan(policy, (1.0, 1.0, 2.0), weights) <= 1.15 * fluid

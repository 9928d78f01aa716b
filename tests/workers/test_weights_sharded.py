"""Weights that every rank of a trainer publishes its own part of; real processes."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from rlinf.comm import Endpoint, MemoryRegistry, RegistryClient, RegistryServer
from rlinf.workers.engines import fsdp, megatron
from rlinf.workers.engines.trainer_config import Parallel
from rlinf.workers.fingerprint import fingerprint
from rlinf.workers.shards import Shard
from rlinf.workers.weights import WeightPublisher, WeightReceiver, WeightsCorrupt, WeightsUnchanged
from tests.workers.ranks import Ranks
from tests.workers.test_fsdp import CONFIG, STEPS, tiny, weights_of
from tests.workers.test_weights import Target

LAYOUTS = {
    "fsdp": (fsdp.make, CONFIG),
    "tensor": (megatron.make, dataclasses.replace(CONFIG, parallel=Parallel(tensor=2))),
    "pipeline": (megatron.make, dataclasses.replace(CONFIG, parallel=Parallel(pipeline=2))),
    "last layer": (
        megatron.make,
        dataclasses.replace(CONFIG, parallel=Parallel(pipeline=2), trainable_layers=1),
    ),
}


def learn_and_fetch(team, registry, layout):
    """On every rank: two versions, published together and fetched by a rollout beside it.

    Returns how large a part of the weights it published, whether its rollout had what the ranks
    have together, and which tensors the second version brought.
    """
    make, config = layout
    client = RegistryClient(*registry)
    mates = tuple(f"trainer/{k}" for k in range(team.size) if k != team.rank)
    with (
        Endpoint(f"trainer/{team.rank}", registry=client) as trainer,
        Endpoint(f"rollout/{team.rank}", registry=client) as rollout,
    ):
        engine = make(tiny(), config, team)
        publisher = WeightPublisher(trainer, mates, team.gather)
        target = Target(dict(tiny().named_parameters()))
        receiver = WeightReceiver(rollout, target)
        equal = []
        for version, groups in enumerate(STEPS[:2]):
            published = publisher.publish(engine.state(), version)
            team.gather(None)  # as a call of the group does, which is done when all ranks are
            fetched = receiver.fetch("trainer/0", version)
            whole = team.first(weights_of(engine, team))  # both rollouts are done with this version
            equal.append(all(torch.equal(target.state()[n], value) for n, value in whole.items()))
            engine.accumulate(groups[team.rank :: team.size])
            engine.end_round()
            engine.finish_step()
        count = sum(part.values.numel() for part in published.state.values())
        total = sum(value.numel() for value in whole.values())
        return count / total, equal, sorted(fetched.state), receiver.fingerprint


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollout_has_what_the_ranks_publish_together(two, layout):
    if LAYOUTS[layout][0] is megatron.make:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with RegistryServer() as registry:
        found = two.run(learn_and_fetch, (registry.address, registry.token), LAYOUTS[layout])
    (share, equal, names, mark), (other_share, other_equal, other_names, other_mark) = found
    assert equal == other_equal == [True, True]
    assert share + other_share == pytest.approx(1.0)
    assert min(share, other_share) > 0.2, "no rank has it all"
    assert (names, mark) == (other_names, other_mark)
    if layout == "last layer":
        assert names and all(".layers.1." in name for name in names), "the rest is not sent again"


@pytest.fixture
def doors():
    registry = MemoryRegistry()
    with (
        Endpoint("trainer/0", registry=registry) as first,
        Endpoint("trainer/1", registry=registry) as second,
        Endpoint("rollout/0", registry=registry) as rollout,
    ):
        yield first, second, rollout


class Two:
    """Two ranks of a trainer in this process; each has a half of every tensor."""

    def __init__(self, doors):
        self.barrier, self.marks = threading.Barrier(2, timeout=20), {}
        self.publishers = [
            WeightPublisher(door, (f"trainer/{1 - rank}",), partial(self.gather, rank))
            for rank, door in enumerate(doors[:2])
        ]

    def gather(self, rank, own):
        self.marks[rank] = own
        self.barrier.wait()
        both = [self.marks[0], self.marks[1]]
        self.barrier.wait()
        return both

    def publish(self, tensors, version):
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(one.publish, halves(tensors, rank), version)
                for rank, one in enumerate(self.publishers)
            ]
        return [call.result() for call in calls]


def halves(tensors, rank):
    """The upper or the lower half of each, as boxes."""
    return {
        name: Shard(value[2 * rank : 2 * rank + 2], tuple(value.shape), (2 * rank, 0))
        for name, value in tensors.items()
    }


def tensors(**changes):
    found = {name: torch.arange(12.0).reshape(4, 3) + k for k, name in enumerate("ab")}
    return found | changes


def test_a_tensor_of_which_a_part_has_changed_comes_whole(doors):
    trainer, target = Two(doors), Target(tensors())
    receiver = WeightReceiver(doors[2], target)
    trainer.publish(tensors(), 1)
    receiver.fetch("trainer/0", 1)
    newer = tensors()
    newer["b"][3] += 1
    trainer.publish(newer, 2)
    assert set(receiver.fetch("trainer/1", 2).state) == {"b"}
    assert all(torch.equal(target.tensors[name], value) for name, value in newer.items())
    assert receiver.fingerprint == fingerprint(newer), "however they were cut"


def test_a_step_must_change_something_on_some_rank(doors):
    trainer = Two(doors)
    trainer.publish(tensors(), 1)
    newer = tensors()
    newer["a"][0] += 1
    assert [one.version for one in trainer.publish(newer, 2)] == [2, 2], "one rank's are as before"
    with pytest.raises(WeightsUnchanged):
        trainer.publish(newer, 3)


def test_a_fetch_between_two_ranks_publishing_waits_for_the_other(doors):
    """The first has the new version already, as where a rollout is started again just then."""
    trainer, target = Two(doors), Target(tensors())
    receiver = WeightReceiver(doors[2], target)
    old, new = tensors(), tensors(a=torch.ones(4, 3))
    trainer.publish(old, 1)
    late = trainer.publishers[1]._latest
    trainer.publish(new, 2)
    current, trainer.publishers[1]._latest = trainer.publishers[1]._latest, late
    timer = threading.Timer(0.3, lambda: setattr(trainer.publishers[1], "_latest", current))
    timer.start()
    assert receiver.fetch("trainer/0").version == 2
    timer.join()
    assert all(torch.equal(target.tensors[name], value) for name, value in new.items())


def test_a_part_that_nobody_publishes_is_said(doors):
    WeightPublisher(doors[0]).publish(halves(tensors(), 0), 1)
    receiver = WeightReceiver(doors[2], Target(tensors()))
    with pytest.raises(WeightsCorrupt, match="do not publish all of version 1: a: 6 of its 12 ele"):
        receiver.fetch("trainer/0")


@pytest.mark.timeout(60)
def test_a_rank_that_is_not_named_is_missed(doors):
    """The ranks agree on what there is, but the first one does not say who has the rest."""
    trainer = Two(doors)
    trainer.publishers[0]._mates = ()
    trainer.publish(tensors(), 1)
    target = Target(tensors(a=torch.zeros(4, 3)))
    with pytest.raises(WeightsCorrupt):
        WeightReceiver(doors[2], target).fetch("trainer/0")
    assert not target.tensors["a"].any()

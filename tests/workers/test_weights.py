import itertools

import numpy as np
import pytest
import torch

from rlinf.comm import Endpoint, MemoryRegistry
from rlinf.comm.errors import CommError
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.fingerprint import fingerprint
from rlinf.workers.weights import (
    WeightPublisher,
    WeightReceiver,
    WeightsCorrupt,
    WeightsUnchanged,
    WeightsUnknown,
)


class Target:
    """Weights in place, and a record of what was loaded."""

    def __init__(self, state):
        self.tensors = {name: torch.zeros_like(value) for name, value in state.items()}
        self.version = 0
        self.loaded = []

    def state(self):
        return self.tensors

    def load_state(self, state, version):
        for name, value in state.items():
            self.tensors[name].copy_(value)
        self.loaded.append(sorted(state))
        self.version = version


class Deaf(Target):
    """Loads into copies, like an engine that computes with other tensors than it shows."""

    def load_state(self, state, version):
        self.version = version


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 64, generator=generator),
        "half": torch.randn(65, 7, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 3),
    }


def changed(state, *names):
    return {n: v + 1 if n in names else v for n, v in state.items()}


@pytest.fixture
def doors():
    registry = MemoryRegistry()
    with (
        Endpoint("trainer/0", registry=registry) as trainer,
        Endpoint("rollout/0", registry=registry) as rollout,
    ):
        yield trainer, rollout


def same(one, two):
    return all(torch.equal(one[name], two[name].to(one[name].dtype)) for name in one)


def test_a_version_arrives_with_its_fingerprint(doors):
    trainer, rollout = doors
    state = weights()
    publisher, target = WeightPublisher(trainer), Target(state)
    receiver = WeightReceiver(rollout, target)
    assert receiver.fingerprint == ""
    published = publisher.publish(state, 3)
    state["embed"] += 1  # the trainer goes on; the snapshot stays
    fetched = receiver.fetch("trainer/0", 3, timeout=20)
    assert (fetched.version, target.version) == (3, 3)
    assert fetched.fingerprint == receiver.fingerprint == published.fingerprint
    assert same(target.state(), weights())
    assert fingerprint(target.state()) == published.fingerprint


def test_only_what_changed_is_sent(doors):
    trainer, rollout = doors
    state = weights()
    publisher, target = WeightPublisher(trainer), Target(state)
    receiver = WeightReceiver(rollout, target)
    first = publisher.publish(state, 0)
    receiver.fetch("trainer/0")
    second = publisher.publish(changed(state, "half"), 1)
    receiver.fetch("trainer/0", 1)
    receiver.fetch("trainer/0", 1)
    late = Target(state)
    WeightReceiver(rollout, late).fetch("trainer/0")
    assert target.loaded == [sorted(state), ["half"], []]
    assert late.loaded == [sorted(state)]
    assert second.state["embed"] is first.state["embed"]
    assert same(target.state(), changed(state, "half"))
    assert same(late.state(), changed(state, "half"))


def test_a_step_that_changed_nothing_is_an_error(doors):
    publisher = WeightPublisher(doors[0])
    state = weights()
    publisher.publish(state, 1)
    with pytest.raises(WeightsUnchanged, match="version 2") as caught:
        publisher.publish(state, 2)
    assert caught.value.fingerprint == fingerprint(state)
    assert publisher.publish(state, 1).version == 1
    with pytest.raises(WeightsUnchanged):
        publisher.publish(changed(state, "half"), 1)
    assert publisher.publish(changed(state, "half"), 2).version == 2


def test_an_engine_that_serves_something_else_is_found_out(doors):
    trainer, rollout = doors
    WeightPublisher(trainer).publish(weights(), 1)
    receiver = WeightReceiver(rollout, Deaf(weights()))
    with pytest.raises(WeightsCorrupt, match="still serves another embed"):
        receiver.fetch("trainer/0")
    assert receiver.fingerprint == ""


def test_what_arrives_broken_leaves_the_old_version_serving(doors):
    trainer, rollout = doors
    state = weights()
    publisher, target = WeightPublisher(trainer), Target(state)
    receiver = WeightReceiver(rollout, target)
    publisher.publish(state, 1)
    receiver.fetch("trainer/0")
    newer = changed(state, "embed")
    published = publisher.publish(newer, 2)
    published.state["embed"][7, 7] += 1e-3  # memory that rots between the two fingerprints
    with pytest.raises(WeightsCorrupt, match="fetch it again"):
        receiver.fetch("trainer/0", 2)
    assert target.version == 1
    assert same(target.state(), state)
    published.state["embed"].copy_(newer["embed"])
    assert receiver.fetch("trainer/0", 2).version == 2
    assert same(target.state(), newer)


def test_a_fetch_that_failed_can_be_repeated(doors):
    trainer, rollout = doors
    target = Target(weights())
    receiver = WeightReceiver(rollout, target)
    with pytest.raises(CommError):
        receiver.fetch("trainer/7", timeout=0.2)
    publisher = WeightPublisher(trainer)
    with pytest.raises(WeightsUnknown, match="published nothing"):
        receiver.fetch("trainer/0")
    publisher.publish(weights(), 4)
    with pytest.raises(WeightsUnknown, match="version 4") as caught:
        receiver.fetch("trainer/0", 5)
    assert (caught.value.wanted, caught.value.latest) == (5, 4)
    assert receiver.fetch("trainer/0", 4).version == 4
    assert receiver.fetch("trainer/0", 3).version == 4


def test_publishing_and_fetching_again_is_as_once(doors):
    trainer, rollout = doors
    publisher, target = WeightPublisher(trainer), Target(weights())
    receiver = WeightReceiver(rollout, target)
    first = publisher.publish(weights(), 1)
    assert publisher.publish(weights(), 1) is first
    for _ in range(3):
        assert receiver.fetch("trainer/0", 1).fingerprint == first.fingerprint
    assert target.loaded == [sorted(weights()), [], []]


class Breaks(Target):
    """Fails in the middle of its first load, having changed a part."""

    def load_state(self, state, version):
        if not self.loaded:
            self.loaded.append("broken")
            self.tensors["embed"].copy_(state["embed"])
            raise RuntimeError("out of memory")
        super().load_state(state, version)


def test_a_load_that_broke_off_is_made_good_by_the_next_fetch(doors):
    """All tensors are sent then: nobody knows which of them were changed."""
    trainer, rollout = doors
    WeightPublisher(trainer).publish(weights(), 1)
    target = Breaks(weights())
    receiver = WeightReceiver(rollout, target)
    with pytest.raises(RuntimeError, match="out of memory"):
        receiver.fetch("trainer/0", 1)
    assert target.version == 0 and receiver.fingerprint == ""
    receiver.fetch("trainer/0", 1)
    assert target.version == 1 and same(target.state(), weights())
    assert target.loaded == ["broken", sorted(weights())]


def test_a_trainer_that_went_back_offers_its_older_weights(doors):
    trainer, rollout = doors
    publisher, target = WeightPublisher(trainer), Target(weights())
    receiver = WeightReceiver(rollout, target)
    publisher.publish(changed(weights(), "embed"), 12)
    receiver.fetch("trainer/0", 12)
    publisher.forget()
    with pytest.raises(WeightsUnknown, match="published nothing"):
        receiver.fetch("trainer/0")
    assert target.version == 12
    publisher.publish(weights(), 10)
    assert receiver.fetch("trainer/0", 10).version == 10
    assert target.version == 10 and same(target.state(), weights())
    assert target.loaded[-1] == ["embed"]


def test_a_rollout_in_another_precision_converts(doors):
    trainer, rollout = doors
    source = build_model(ModelSpec(vocab_size=11, seed=1))
    engine = TorchGenerate(build_model(ModelSpec(vocab_size=11, dtype="bfloat16")))
    state = {name: value.detach() for name, value in source.named_parameters()}
    WeightPublisher(trainer).publish(state, 1)
    WeightReceiver(rollout, engine).fetch("trainer/0", 1)
    assert engine.version == 1
    assert all(torch.equal(engine.state()[n], v.bfloat16()) for n, v in state.items())


def test_weights_of_another_model_are_refused(doors):
    trainer, rollout = doors
    engine = TorchGenerate(build_model(ModelSpec(vocab_size=11)))
    before = fingerprint(engine.state())
    WeightPublisher(trainer).publish(weights(), 1)
    with pytest.raises(WeightsMismatch, match="no parameter"):
        WeightReceiver(rollout, engine).fetch("trainer/0")
    assert fingerprint(engine.state()) == before
    assert engine.version == 0


def test_the_fingerprint_sees_every_kind_of_difference():
    base = weights()
    values = [base]
    values += [changed(base, name) for name in ("embed", "half", "scale")]
    values += [
        base | {"embed": base["embed"].T.contiguous()},
        base | {"embed": base["embed"].flip(0)},
        base | {"embed": -base["embed"]},
        base | {"half": base["half"].float()},
        base | {"embed": base["embed"].view(64, 300)},
        base | {"empty": torch.zeros(3, 0)},
        {("other" if n == "half" else n): v for n, v in base.items()},
        {n: v for n, v in base.items() if n != "scale"},
    ]
    prints = [fingerprint(value) for value in values]
    assert len(set(prints)) == len(prints)
    reordered = dict(reversed(base.items()))
    assert fingerprint(reordered) == fingerprint(weights()) == prints[0]
    strided = base | {"embed": base["embed"].T.contiguous().T}
    assert fingerprint(strided) == prints[0]


def test_no_pair_of_small_accidents_cancels():
    size = 3 * 8192 + 5
    base = torch.zeros(size)
    seen = {fingerprint({"x": base})}
    places = [0, 1, 8191, 8192, 8193, 16384, 24576, size - 1]
    for one, two in itertools.combinations(places, 2):
        for value in (1.0, -0.0, 2.0**-149):
            broken = base.clone()
            broken[[one, two]] = value
            seen.add(fingerprint({"x": broken}))
    assert len(seen) == 1 + 3 * len(list(itertools.combinations(places, 2)))


def test_swapped_blocks_are_different():
    rng = np.random.default_rng(0)
    block = torch.from_numpy(rng.standard_normal(8192).astype(np.float32))
    other = torch.from_numpy(rng.standard_normal(8192).astype(np.float32))
    one, two = torch.cat([block, other, block]), torch.cat([other, block, block])
    assert fingerprint({"x": one}) != fingerprint({"x": two})

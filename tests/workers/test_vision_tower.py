"""The vision tower as a component of its own: who sees which version, and what is learnt."""

import itertools
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.workers.engines.buckets import Buckets
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.policies import PolicySpec, build_policy
from rlinf.workers.engines.policy_trainer import PolicyTrainer, PolicyTrainerConfig
from rlinf.workers.engines.vision_tower import FeatureCache, VisionConfig, VisionTower
from rlinf.workers.engines.vla_policy import VlaSizes
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import Trajectory

sys.path.insert(0, str(Path(__file__).parent))
import worlds

SIZES = VlaSizes(width=16, layers=1, heads=2, patch=8, vision_layers=1, bins=5, chunk=2)
SPEC = PolicySpec("vla", vla=SIZES)
SPACES = worlds.Painter.spaces
# Clipping would scale the tower's gradient with the rest's or by itself, as it learns.
ADAM = OptimiserConfig(lr=1e-3, warmup_steps=0, clip_norm=1e9)
CONFIG = PolicyTrainerConfig(optimiser=ADAM, epochs=2, minibatch=8)


def policy():
    made = build_policy(SPEC, SPACES)
    with torch.no_grad():  # at first its answers do not depend on pictures
        for head in (made.head, made.value_head):
            head.weight.add_(torch.randn(head.weight.shape, generator=torch.manual_seed(1)))
    return made


def trajectory(number=0, steps=8, count=2, first=0):
    rng = np.random.default_rng(10 * number + first)
    grid, blank = (steps, count), np.zeros((steps, count), bool)
    return Trajectory(
        uid=f"{number}.{first}",
        environments=np.arange(first, first + count, dtype=np.int32),
        observations={
            "image": rng.integers(0, 255, (steps + 1, count, 16, 16, 3)).astype(np.uint8),
            "state": rng.standard_normal((steps + 1, count, 1)).astype(np.float32),
            "instruction": np.ones((steps + 1, count, 16), np.int32),
        },
        choices=rng.integers(0, 5, (*grid, 2, 2)).astype(np.int16),
        logprobs=np.full(grid, -6.4, np.float32),
        rewards=rng.standard_normal(grid).astype(np.float32),
        terminated=blank,
        truncated=blank,
        valid=~blank,
        steps=np.ones(grid, np.int32),
        finals={
            "image": np.zeros((0, 16, 16, 3), np.uint8),
            "state": np.zeros((0, 1), np.float32),
            "instruction": np.zeros((0, 16), np.int32),
        },
        ends=np.zeros((0, 2), np.int32),
        episodes=(),
        seeds=np.arange(count),
        version=0,
    )


def trained(update, iterations=3, team=None, **settings):
    own = {name: settings.pop(name) for name in ("every", "staleness") if name in settings}
    config = replace(CONFIG, vision=VisionConfig(update, **own), **settings)
    trainer = PolicyTrainer(policy(), config, team)
    towers = [flat(trainer.policy.vision)]
    for number in range(iterations):
        trainer.accumulate([trajectory(number)])
        trainer.finish_step()
        towers.append(flat(trainer.policy.vision))
    return trainer, towers


def flat(module):
    """All weights but the offsets of attention's keys: these change nothing, and so they go where
    rounding takes them."""
    parts = []
    for name, parameter in module.named_parameters():
        part = parameter.detach().clone()
        if name.endswith("in_proj_bias"):
            part.view(3, -1)[1] = 0
        parts.append(part.flatten())
    return torch.cat(parts)


class Doubling(torch.nn.Module):
    """A tower that counts the pictures it is given."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.seen = 0

    def forward(self, images):
        self.seen += len(images)
        return self.scale * images.float().mean((1, 2))


def pictures(*values):
    return (
        torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 4, 4, 3).contiguous()
    )


def test_features_are_computed_once_a_picture_and_version():
    tower, cache = Doubling(), FeatureCache(1 << 20)
    first = cache.features(tower, 0, pictures(1, 2, 1))
    assert first[:, 0].tolist() == [2, 4, 2]
    assert (tower.seen, cache.hits, cache.misses) == (2, 1, 2)
    assert cache.features(tower, 0, pictures(2, 3))[:, 0].tolist() == [4, 6]
    assert (tower.seen, cache.hits, cache.misses) == (3, 2, 3)
    with torch.no_grad():
        tower.scale.fill_(3)
    assert cache.features(tower, 1, pictures(1, 2))[:, 0].tolist() == [3, 6], "a newer version"
    assert (tower.seen, cache.misses) == (5, 5)
    assert cache.features(tower, 1, pictures()[:0]).shape == (0, 3)


def test_the_oldest_features_make_room():
    tower, cache = Doubling(), FeatureCache(2 * 3 * 4)
    cache.features(tower, 0, pictures(1, 2, 3))
    cache.features(tower, 0, pictures(2, 3))
    assert tower.seen == 3
    assert cache.features(tower, 0, pictures(1))[0, 0] == 2
    assert tower.seen == 4


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_tower_that_learns_in_every_iteration_is_the_joint_model(epochs):
    joint, _ = trained("joint", epochs=epochs)
    apart, _ = trained("every", every=1, epochs=epochs)
    assert torch.allclose(flat(joint.policy), flat(apart.policy), atol=1e-7)


def test_a_frozen_one_stays_and_its_features_are_computed_once():
    trainer, towers = trained("frozen", iterations=2)
    assert all(torch.equal(tower, towers[0]) for tower in towers)
    assert not torch.equal(flat(trainer.policy.trunk), flat(policy().trunk))
    assert trainer.tower.cache.misses == 2 * 9 * 2, "once a picture, whatever the passes"


def test_every_other_iteration_moves_it_then_only():
    trainer, towers = trained("every", iterations=4, every=2)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(towers)]
    assert moved == [True, False, True, False], "nor does momentum move it"
    assert trainer.tower.version == 2


def test_frozen_features_give_what_a_frozen_tower_gives():
    trainer, _ = trained("frozen", iterations=2)
    plain = policy()
    plain.vision.requires_grad_(requires_grad=False)
    other = PolicyTrainer(plain, CONFIG)
    for number in range(2):
        other.accumulate([trajectory(number)])
        other.finish_step()
    assert torch.allclose(flat(trainer.policy), flat(other.policy), atol=1e-6)


def test_a_late_one_that_may_not_be_late_is_the_joint_model():
    """With one optimiser step an iteration, features are never older than that step."""
    joint, _ = trained("joint", epochs=1, minibatch=16)
    late, _ = trained("late", staleness=0, epochs=1, minibatch=16)
    late.tower.catch_up(0)
    assert torch.allclose(flat(joint.policy), flat(late.policy), atol=1e-6)
    assert late.tower.version == 3


GATE = threading.Event()


class Gated(Doubling):
    """A tower that learns when it is let to."""

    def forward(self, images):
        if torch.is_grad_enabled():
            assert GATE.wait(30)
        return super().forward(images)


def test_a_late_one_is_waited_for_only_at_the_bound():
    GATE.clear()
    tower = VisionTower(Gated(), VisionConfig("late", staleness=2), ADAM)
    lesson = [(pictures(1, 2), torch.ones(2, 3))]
    for _ in range(2):
        tower.teach(lesson)
        tower.catch_up()
    assert tower.version == 0, "nobody waited"
    before = tower.look({"image": pictures(1)})["features"]
    tower.teach(lesson)
    caught = threading.Thread(target=tower.catch_up)
    caught.start()
    caught.join(0.2)
    assert caught.is_alive(), "three lessons behind are one too many"
    GATE.set()
    caught.join(30)
    assert tower.version >= 1
    tower.catch_up(0)
    assert tower.version == 3
    after = tower.look({"image": pictures(1)})["features"]
    assert not torch.equal(before, after), "the cache knows the version"


def test_a_late_one_goes_on_from_a_checkpoint():
    whole, _ = trained("late", iterations=4, staleness=0)
    half, _ = trained("late", iterations=2, staleness=0)
    tensors, numbers = half.save()
    copied = {name: tensor.clone() for name, tensor in tensors.items()}
    again = PolicyTrainer(policy(), half._config)
    again.restore(copied, numbers)
    for number in (2, 3):
        again.accumulate([trajectory(number)])
        again.finish_step()
    for trainer in (whole, again):
        trainer.tower.catch_up(0)
    assert torch.allclose(flat(whole.policy), flat(again.policy), atol=1e-7)


class Together:
    """A team of threads; notes how many numbers each sum had."""

    def __init__(self, rank, size, barrier, table):
        self.rank, self.size, self._barrier, self._table = rank, size, barrier, table
        self.sums = []

    def _shared(self, value):
        self._table[self.rank] = value
        self._barrier.wait(30)
        found = list(self._table)
        self._barrier.wait(30)
        return found

    def gather(self, value):
        return self._shared(value)

    def add(self, tensor):
        self.sums.append(tensor.numel())
        total = torch.stack(self._shared(tensor.clone())).sum(0)
        tensor.copy_(total)


def test_ranks_share_minibatches_and_reduce_the_tower_with_the_rest():
    lanes = [trajectory(0, first=0), trajectory(0, first=2)]
    config = replace(CONFIG, vision=VisionConfig("every", every=1), epochs=1, minibatch=16)
    alone = PolicyTrainer(policy(), config)
    alone.accumulate(lanes)
    expected = alone.finish_step()
    barrier, table = threading.Barrier(2), [None, None]
    teams = [Together(rank, 2, barrier, table) for rank in range(2)]
    trainers = [PolicyTrainer(policy(), config, team) for team in teams]
    stats = [None, None]

    def work(rank):
        trainers[rank].accumulate([lanes[rank]])
        stats[rank] = trainers[rank].finish_step()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for trainer, found in zip(trainers, stats, strict=True):
        # Adam makes a step of what is only the rounding of a zero: some may differ, few.
        away = (flat(trainer.policy) - flat(alone.policy)).abs()
        assert (away > 1e-5).float().mean() < 0.02
        assert found.policy_loss == pytest.approx(expected.policy_loss, abs=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    learnt = sum(p.numel() for p in alone.policy.parameters() if p.requires_grad)
    assert [size for size in teams[0].sums if size > 4] == [learnt] * 2, "one message an update"


def test_a_bucket_goes_on_where_a_part_ends():
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    buckets = Buckets([first.parameters(), second.parameters()])
    [gradient] = buckets.gradients
    assert gradient.numel() == 8 + 6
    assert [[p.numel() for p in part] for part in buckets.flat] == [[8], [6]]
    second(first(torch.ones(1, 3))).sum().backward()
    assert torch.equal(gradient[8:12].view(2, 2), second.weight.grad)
    with torch.no_grad():
        buckets.flat[1][0].zero_()
    assert not second.weight.any() and first.weight.any()
    small = Buckets([first.parameters(), second.parameters()], numbers=6)
    assert [g.numel() for g in small.gradients] == [6, 6, 2]
    assert [[p.numel() for p in part] for part in small.flat] == [[6, 2], [4, 2]]


@pytest.mark.parametrize("update", ["joint", "every", "late"])
def test_it_goes_on_from_what_somebody_else_has_trained(update):
    trainer = PolicyTrainer(policy(), replace(CONFIG, vision=VisionConfig(update, staleness=0)))
    adam = torch.optim.SGD(trainer.policy.parameters(), lr=0.1)
    for parameter in trainer.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    adam.zero_grad()
    before, tower = flat(trainer.policy), flat(trainer.policy.vision)
    trainer.adopt()
    assert torch.equal(flat(trainer.policy), before)
    trainer.accumulate([trajectory()])
    trainer.finish_step()
    if trainer.tower is not None:
        trainer.tower.catch_up(0)
    assert not torch.equal(flat(trainer.policy.trunk), flat(policy().trunk))
    moved = (flat(trainer.policy) - before).abs()
    assert 0 < moved.max() < 0.05, "from there, not from where it began"
    assert 0 < (flat(trainer.policy.vision) - tower).abs().max() < 0.05


def test_what_cannot_be_is_refused():
    flat_policy = build_policy(PolicySpec(), worlds.Drift.spaces)
    with pytest.raises(ConfigError, match="has no vision tower"):
        PolicyTrainer(flat_policy, replace(CONFIG, vision=VisionConfig("frozen")))
    team = Together(0, 2, None, None)
    with pytest.raises(ConfigError, match="one rank"):
        PolicyTrainer(policy(), replace(CONFIG, vision=VisionConfig("late")), team)

"""The fsdp engine on two ranks does what the plain one does on one."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.workers.algorithms.losses import Normalisation
from rlinf.workers.algorithms.shaping import DynamicSampling
from rlinf.workers.engines import fsdp
from rlinf.workers.engines.lora import Lora
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import NonFiniteGradient, OptimiserConfig
from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.engines.policy_step import settle
from rlinf.workers.engines.sharded_trainer import shares
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup, TrainerEngine
from rlinf.workers.shards import as_shards, load_tensors, save_tensors
from rlinf.workers.team import Team
from tests.workers.ranks import Ranks

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

VOCABULARY = 21
CONFIG = TrainerConfig(OptimiserConfig(lr=1e-2, warmup_steps=2, weight_decay=0.01))
ALONE = Team()


def tiny(dtype=torch.float64):
    """In float64, so that sums in another order are equal to 1e-12."""
    return build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32)).to(dtype)


def gpt2():
    """A model that the embedded decoder cannot run: it goes through its own forward."""
    sizes = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(0)
    return GPT2LMHeadModel(sizes).double().eval()


def scored_groups(count=8, *, n=4, seed=0):
    """Groups of ragged lengths; every fourth has equal rewards, every third an unscored sample."""
    rng = np.random.default_rng(seed)
    sampling = Sampling(stop_ids=(2,), banned_ids=(0, 1))
    asked = [
        GenerationRequest(
            f"{seed}.{i}", rng.integers(3, VOCABULARY, rng.integers(2, 9)), n, 9, sampling
        )
        for i in range(count)
    ]
    groups = {group.uid: group for group in TorchGenerate(tiny(torch.float32)).generate(asked)}
    found = []
    for i, request in enumerate(asked):
        values = [0.5] * n if i % 4 == 3 else rng.random(n).tolist()
        scores = [
            Score(v, "unscored" if i % 3 == 0 and j == 1 else "scored")
            for j, v in enumerate(values)
        ]
        found.append(ScoredGroup.of(groups[request.uid], scores))
    return found


STEPS = [scored_groups(seed=seed) for seed in range(3)]


def weights_of(engine, team):
    """Whole and copied, on rank 0; nothing on the others."""
    whole = team.collect(as_shards(engine.state()))
    return {name: value.clone() for name, value in whole.items()}


def train(engine, steps, give=lambda groups: groups, team=ALONE):
    """The numbers of each step, and the weights after the last."""
    found = []
    for groups in steps:
        engine.accumulate(give(groups))
        engine.end_round()
        found.append(engine.finish_step().metrics())
    return found, weights_of(engine, team)


def train_together(team, config, steps, model=tiny, skew=False):
    """On every rank: half of the groups are given to each, or with `skew` all to the last."""
    engine = fsdp.make(model(), config, team)

    def own(groups):
        if skew:
            return groups if team.rank == team.size - 1 else []
        return groups[team.rank :: team.size]

    return train(engine, steps, own, team)


def alone(config, steps, model=tiny):
    return train(TorchTrainer(model(), config), steps)


def assert_same(found, expected, tolerance=1e-9):
    (metrics, state), (other_metrics, other_state) = found, expected
    for one, other in zip(metrics, other_metrics, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    assert state.keys() == other_state.keys()
    for name, value in state.items():
        assert torch.allclose(value, other_state[name], rtol=0, atol=tolerance), name


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


CONFIGS = {
    "token": CONFIG,
    "small pieces": dataclasses.replace(CONFIG, micro_batch_tokens=1),
    "uneven pieces": dataclasses.replace(CONFIG, micro_batch_logits=10 * VOCABULARY),
    "constant": dataclasses.replace(
        CONFIG, normalisation=Normalisation("constant", 9), advantage="dr_grpo"
    ),
    "whole batch": dataclasses.replace(CONFIG, advantage="reinforce++"),
    "last layer": dataclasses.replace(CONFIG, trainable_layers=1),
    "recomputed": dataclasses.replace(CONFIG, activation_checkpointing=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_step_as_one_process_does(two, name):
    config = CONFIGS[name]
    results = two.run(train_together, config, STEPS)
    expected = alone(dataclasses.replace(config, activation_checkpointing=False), STEPS)
    assert_same(results[0], expected)
    assert results[1][0] == results[0][0], "every rank knows what the step was"
    assert results[1][1] == {}, "rank 0 alone has the whole weights"


def test_who_was_given_what_changes_nothing(two):
    skewed = two.run(train_together, CONFIG, STEPS, tiny, True)
    even = two.run(train_together, CONFIG, [groups[::-1] for groups in STEPS])
    assert_same(skewed[0], even[0], 0.0)


def test_a_rank_without_samples_joins_in(two):
    steps = [groups[:1] for groups in STEPS]
    config = dataclasses.replace(CONFIG, micro_batch_tokens=1)
    assert_same(two.run(train_together, config, steps)[0], alone(config, steps))


@pytest.mark.parametrize("again", [False, True])
def test_a_model_with_a_forward_of_its_own(two, again):
    config = dataclasses.replace(CONFIG, activation_checkpointing=again)
    assert_same(two.run(train_together, config, STEPS, gpt2)[0], alone(CONFIG, STEPS, gpt2))


LORA = dataclasses.replace(CONFIG, lora=Lora(rank=4, alpha=8.0))


def test_adapters(two):
    pytest.importorskip("peft")
    assert_same(two.run(train_together, LORA, STEPS)[0], alone(LORA, STEPS))


def single(dtype=torch.float32):
    return tiny(dtype)


def test_bfloat16_is_the_same_on_two_ranks(two):
    """Parameters stay in float32; sums over other micro-batches differ by bfloat16's rounding."""
    fast = dataclasses.replace(CONFIG, autocast="always", old_logprobs="trainer")
    metrics, state = two.run(train_together, fast, STEPS[:1], single)[0]
    [expected], _ = alone(fast, STEPS[:1], single)
    [exact], _ = alone(dataclasses.replace(fast, autocast=False), STEPS[:1], single)
    assert metrics[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert metrics[0]["grad_norm"] != pytest.approx(exact["grad_norm"], rel=1e-5)
    assert {value.dtype for value in state.values()} == {torch.float32}


def supervised(team):
    engine = TorchTrainer(tiny()) if team is None else fsdp.make(tiny(), CONFIG, team)
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(3, 20, 4).astype(np.int32), rng.integers(3, 20, n).astype(np.int32))
        for n in (1, 2, 5, 3, 4)
    ]
    written = [rng.random(len(response)) < 0.7 for _, response in pairs]
    losses = [engine.sft_step(pairs, OptimiserConfig(), told) for told in (None, written, None)]
    return losses, weights_of(engine, team or ALONE)


def test_supervised_steps(two):
    (losses, state), (expected, other) = two.run(supervised)[0], supervised(None)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert all(torch.allclose(state[name], other[name], atol=1e-9, rtol=0) for name in other)


def write(engine, folder, rank=0):
    tensors, numbers = engine.save()
    save_tensors(folder / f"trainer-{rank}.safetensors", as_shards(tensors))
    (folder / "numbers.json").write_text(json.dumps(numbers))


def read(engine, folder):
    numbers = json.loads((folder / "numbers.json").read_text())
    engine.restore(load_tensors(folder.glob("trainer-*")), numbers)


def train_and_write(team, folder):
    engine = fsdp.make(tiny(), CONFIG, team)
    train(engine, STEPS[:2], team=team)
    write(engine, folder, team.rank)


def read_and_train(team, folder):
    engine = fsdp.make(tiny(), CONFIG, team)
    engine.accumulate(STEPS[0])  # a step that was begun is forgotten
    read(engine, folder)
    return train(engine, STEPS[2:], lambda groups: groups[team.rank :: team.size], team)


def test_a_checkpoint_goes_on_at_any_size_and_with_either_engine(two, tmp_path):
    expected = alone(CONFIG, STEPS)
    expected = (expected[0][2:], expected[1])
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    two.run(train_and_write, tmp_path / "two")
    plain = TorchTrainer(tiny(), CONFIG)
    train(plain, [groups + groups for groups in STEPS[:2]])  # both ranks were given everything
    write(plain, tmp_path / "one")
    for folder in (tmp_path / "two", tmp_path / "one"):
        found = two.run(read_and_train, folder)[0]
        other = TorchTrainer(tiny(), CONFIG)
        read(other, folder)
        assert_same(train(other, STEPS[2:]), found)
        team = Team()
        assert_same(read_and_train(team, folder), found)
        team.close()


def test_one_rank_in_this_process_is_a_trainer_engine():
    team = Team()
    engine = fsdp.make(tiny(), CONFIG, team)
    assert isinstance(engine, TrainerEngine)
    assert_same(train(engine, STEPS), alone(CONFIG, STEPS))
    tensors, numbers = engine.save()
    whole = {name: shard.values for name, shard in tensors.items()}
    del whole["model.model.norm.weight"]
    before = weights_of(engine, team)
    with pytest.raises(WeightsMismatch, match=r"no values for the parameter model\.norm\.weight"):
        engine.restore(whole, numbers)
    assert all(torch.equal(before[name], value) for name, value in weights_of(engine, team).items())
    before = engine.resident_bytes()
    engine.offload()
    engine.onload()
    assert engine.resident_bytes() == before > 0
    engine.accumulate(STEPS[0])
    with pytest.raises(ValueError, match="finish the policy step"):
        engine.save()
    with pytest.raises(ValueError, match="finish the policy step"):
        engine.sft_step([], OptimiserConfig())
    team.close()


def broken(team):
    engine = fsdp.make(tiny(), CONFIG, team)
    engine.accumulate(STEPS[0])
    for value in engine._model.tensors().values():
        with torch.no_grad():
            value.fill_(float("nan"))
    try:
        engine.finish_step()
    except NonFiniteGradient:
        return "dropped"
    return "stepped"


def test_a_gradient_that_is_no_number_is_dropped_by_all(two):
    assert two.run(broken) == ["dropped", "dropped"]


def rounds(team):
    """Rank 0 is given nothing, and the first round has one group to learn from."""
    wanting = dataclasses.replace(CONFIG, dynamic=DynamicSampling(groups=4, rounds=3))
    engine = fsdp.make(tiny(), wanting, team)
    found = []
    for part in (STEPS[0][2:4], STEPS[0][4:8]):
        engine.accumulate(part if team.rank else [])
        found.append(engine.end_round())
    return found, engine.finish_step().parts.informative


def test_ranks_agree_on_another_round(two):
    assert two.run(rounds) == [([3, 0], 4)] * 2


def test_shares_are_of_equal_work_and_have_everything():
    rows, _ = settle(STEPS[0] + STEPS[1], CONFIG, 0)
    total = sum(group.cost[0] for group in rows)
    for count in (1, 2, 3, 5):
        cut = shares(rows, count)
        assert len(cut) == count
        assert sum(len(group.mask) for share in cut for group in share) == sum(
            len(group.mask) for group in rows
        )
        work = [sum(group.cost[0] for group in share) for share in cut]
        assert max(work) - min(work) <= total / 10
    assert shares([], 2) == [[], []]

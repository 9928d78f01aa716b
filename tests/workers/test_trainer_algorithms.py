"""Every algorithm of the registry in the embedded trainer."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.workers.algorithms.losses import Normalisation
from rlinf.workers.algorithms.registry import ALGORITHMS
from rlinf.workers.algorithms.shaping import DynamicSampling, Overlong
from rlinf.workers.config import build
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.policy_batch import advantages_of, shaped
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_inference import TorchInference
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup

torch.set_num_threads(1)

VOCABULARY = 21
SAMPLING = Sampling(stop_ids=(2,), banned_ids=(0, 1), temperature=0.8)
LONGEST = 9


def tiny(dtype=torch.float64, sharpness=1.0):
    model = build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharpness)
    return model


def sampled(model, count=6, n=4):
    rng = np.random.default_rng(1)
    asked = [
        GenerationRequest(
            str(i), rng.integers(3, VOCABULARY, rng.integers(2, 9)), n, LONGEST, SAMPLING
        )
        for i in range(count)
    ]
    groups = {group.uid: group for group in TorchGenerate(model).generate(asked)}
    return [groups[request.uid] for request in asked]


def scored(groups):
    """One group in three has equal rewards, another one an unscored sample."""
    rng = np.random.default_rng(2)
    found = []
    for i, group in enumerate(groups):
        values = [0.25] * group.n if i % 3 == 2 else rng.random(group.n).tolist()
        statuses = ["unscored" if i % 3 == 1 and j == 0 else "scored" for j in range(group.n)]
        found.append(
            ScoredGroup.of(group, [Score(*vs) for vs in zip(values, statuses, strict=True)])
        )
    return found


def configured(name, **more):
    settings = ALGORITHMS[name].settings() | {"frozen_steps": 0, "dynamic": None}
    return build(TrainerConfig, settings | {"max_response_tokens": LONGEST} | more)


def with_values(groups):
    """As a critic would: an advantage for each token."""
    rng = np.random.default_rng(3)
    return [
        dataclasses.replace(g, advantages=rng.normal(size=g.group.tokens.shape).astype(np.float32))
        for g in groups
    ]


def stepped(config, groups, cuts=1):
    trainer = TorchTrainer(tiny(), config)
    for part in np.array_split(np.arange(len(groups)), cuts):
        trainer.accumulate([groups[i] for i in part])
    return trainer.finish_step(), trainer.state()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_does_not_depend_on_how_it_was_cut(name):
    groups = scored(sampled(tiny()))
    if name == "ppo":
        groups = with_values(groups)
    first, whole = stepped(configured(name), groups)
    assert first.stepped and first.grad_norm > 0
    for cuts, bounds in ((3, {}), (1, {"micro_batch_tokens": 1}), (6, {"min_batch_tokens": 0})):
        other, state = stepped(configured(name, **bounds), groups[::-1], cuts)
        assert other.grad_norm == pytest.approx(first.grad_norm, rel=1e-9)
        assert other.metrics() == pytest.approx(first.metrics(), rel=1e-6, abs=1e-9)
        for key, value in whole.items():
            assert torch.allclose(state[key], value, atol=1e-10), key


def gpt2():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        return GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [lambda: tiny(torch.float32, sharpness=4.0), gpt2])
def test_rollout_and_trainer_agree_on_log_probs_in_float32(make):
    model = make().eval()
    groups = scored(sampled(model, count=12, n=8))
    assert min(g.group.logprobs.min() for g in groups) < -3, "the policy is too flat to tell"
    for layout in ({"min_batch_tokens": 10**6}, {"micro_batch_tokens": 1}):
        trainer = TorchTrainer(model, TrainerConfig(OptimiserConfig(lr=0.0), **layout))
        trainer.accumulate(groups)
        parts = trainer.finish_step().parts
        assert 0 < parts.ratio_deviation < 1e-5
        assert 0 <= parts.kl / parts.trained_tokens < 1e-9


def test_the_divergence_of_the_rollout_is_always_among_the_metrics():
    groups = scored(sampled(tiny()))
    stats, _ = stepped(TrainerConfig(), groups)
    assert stats.metrics()["kl_rollout"] < 1e-6
    shifted = [
        dataclasses.replace(g, group=dataclasses.replace(g.group, logprobs=g.group.logprobs + 0.1))
        for g in groups
    ]
    stats, _ = stepped(TrainerConfig(old_logprobs="trainer"), shifted)
    assert stats.metrics()["kl_rollout"] == pytest.approx(np.expm1(-0.1) + 0.1, rel=1e-3)
    nothing, _ = stepped(TrainerConfig(), groups[2:3])
    assert nothing.metrics()["kl_rollout"] == 0 and not nothing.stepped


def test_reinforce_plus_plus_is_whitened_over_the_tokens_of_the_step():
    groups = scored(sampled(tiny()))
    found = advantages_of(groups, "reinforce++")
    flat = np.concatenate([a[g.learnable] for a, g in zip(found, groups, strict=True)])
    assert abs(flat.mean()) < 1e-6 and flat.std(ddof=1) == pytest.approx(1, abs=1e-6)
    for advantages, group in zip(found, groups, strict=True):
        assert (advantages[~group.learnable] == 0).all()
        for row, kept in zip(advantages, group.learnable, strict=True):
            assert len(set(row[kept].tolist())) <= 1, "gamma is 1: a response has one return"


def test_the_weights_for_another_rollout_are_truncated():
    groups = scored(sampled(tiny()))
    near = [
        dataclasses.replace(g, group=dataclasses.replace(g.group, logprobs=g.group.logprobs - 5))
        for g in groups
    ]
    plain, _ = stepped(TrainerConfig(old_logprobs="trainer"), groups)
    capped, _ = stepped(TrainerConfig(old_logprobs="trainer", importance_cap=3.0), near)
    assert capped.grad_norm == pytest.approx(3 * plain.grad_norm, rel=1e-6)
    exact, _ = stepped(TrainerConfig(old_logprobs="trainer", importance_cap=3.0), groups)
    assert exact.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)


def test_the_divisor_of_dr_grpo_is_the_longest_response():
    groups = scored(sampled(tiny()))
    stats, _ = stepped(configured("dr_grpo"), groups)
    rows = sum(group.group.n for group in groups)
    assert stats.parts.weight == rows
    twice, _ = stepped(configured("dr_grpo", max_response_tokens=2 * LONGEST), groups)
    assert twice.grad_norm == pytest.approx(stats.grad_norm / 2, rel=1e-9)
    constant = {"kind": "constant", "constant": 4 * LONGEST}
    fixed, _ = stepped(configured("dr_grpo", normalisation=constant), groups)
    assert fixed.grad_norm == pytest.approx(stats.grad_norm / 4, rel=1e-9)
    with pytest.raises(ConfigError, match="max_response_tokens"):
        TorchTrainer(tiny(), TrainerConfig(normalisation=Normalisation("constant")))


def test_long_responses_are_penalised_where_there_is_something_to_choose():
    groups = scored(sampled(tiny()))
    overlong = Overlong(buffer=LONGEST, penalty=1.0)
    for before, after in zip(groups, shaped(groups, overlong, LONGEST), strict=True):
        if not before.informative:
            assert (after.rewards == before.rewards).all()
        else:
            expected = before.rewards - before.group.lengths / LONGEST
            assert after.rewards == pytest.approx(expected)
    stats, _ = stepped(TrainerConfig(overlong=overlong, max_response_tokens=LONGEST), groups)
    assert stats.parts.rows == sum(
        int((a != 0).sum()) for a in advantages_of(shaped(groups, overlong, LONGEST), "grpo")
    )


def test_sampling_goes_on_until_enough_groups_are_informative():
    groups = scored(sampled(tiny()))
    trainer = TorchTrainer(tiny(), TrainerConfig(dynamic=DynamicSampling(groups=5, rounds=3)))
    for _ in range(2):
        trainer.accumulate(groups[2:3])
        assert trainer.end_round() == 5
    trainer.accumulate(groups[2:3])
    assert trainer.end_round() == 0, "three rounds are enough"
    assert not trainer.finish_step().stepped
    trainer.accumulate(groups)
    assert trainer.end_round() == 1, "there are four informative groups"
    trainer.accumulate(groups)
    assert trainer.end_round() == 0
    assert trainer.finish_step().parts.informative == 8
    plain = TorchTrainer(tiny())
    plain.accumulate(groups)
    assert plain.end_round() == 0


def test_frozen_steps_move_nothing_but_count():
    groups = scored(sampled(tiny()))
    trainer = TorchTrainer(tiny(), TrainerConfig(frozen_steps=2))
    versions, rates = [], []
    for _ in range(3):
        trainer.accumulate(groups)
        stats = trainer.finish_step()
        versions.append(stats.version)
        rates.append(stats.lr)
    assert versions == [0, 0, 1]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4])
    assert stats.metrics()["reward"] > 0


def test_tokens_that_the_model_did_not_write_teach_nothing():
    """The gradient is that of the other tokens, in the context of all."""
    groups = scored(sampled(tiny()))
    rng = np.random.default_rng(4)
    held, noisy = [], []
    for g in groups:
        written = rng.random(g.group.tokens.shape) < 0.6
        noise = np.where(written, 0, rng.normal(size=written.shape)).astype(np.float32)
        group = dataclasses.replace(g.group, written=written)
        held.append(dataclasses.replace(g, group=group))
        noisy.append(
            dataclasses.replace(
                g, group=dataclasses.replace(group, logprobs=group.logprobs + 5 * noise)
            )
        )
    for name in ("grpo", "dapo", "gspo", "reinforce++"):
        stats, state = stepped(configured(name), held)
        other, same = stepped(configured(name), noisy)
        assert stats.parts.trained_tokens == sum(
            int(g.learnable[np.any(a != 0, 1) if a.ndim > 1 else a != 0].sum())
            for g, a in zip(held, advantages_of(held, configured(name).advantage), strict=True)
        )
        assert other.metrics() == pytest.approx(stats.metrics(), rel=1e-9, abs=1e-12)
        for key, value in state.items():
            assert torch.equal(same[key], value), (name, key)


def test_a_divergence_penalty_moves_rows_without_an_advantage():
    (equal,) = scored(sampled(tiny()))[2:3]
    far = dataclasses.replace(equal, reference_logprobs=equal.group.logprobs - 1)
    stats, _ = stepped(TrainerConfig(kl_coefficient=0.1), [far])
    assert stats.stepped and stats.parts.rows == equal.group.n
    plain, _ = stepped(TrainerConfig(), [far])
    assert not plain.stepped


def test_a_gradient_of_zero_is_no_step():
    """As where no answer is right yet, and the reference is still the policy itself.

    Weights of a new version that are those of the old one would be refused.
    """
    model = tiny(torch.float32)
    (equal,) = scored(sampled(model))[2:3]
    config = TrainerConfig(kl_coefficient=0.1)
    [same] = TorchInference(tiny(torch.float32), config, "reference_logprobs").compare([equal])
    trainer = TorchTrainer(model, config)
    trainer.accumulate([same])
    stats = trainer.finish_step()
    assert stats.parts.rows == equal.group.n and stats.grad_norm == 0
    assert not stats.stepped and stats.version == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_cap": 2.0}, "importance_cap needs old_logprobs=trainer"),
        ({"advantage": "reinforce++", "dynamic": DynamicSampling()}, "needs groups"),
        ({"advantage": "gae", "overlong": Overlong()}, "critic reads them"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**settings)

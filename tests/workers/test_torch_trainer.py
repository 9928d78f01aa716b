import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.workers.algorithms.losses import Clip, Normalisation
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import NonFiniteGradient, OptimiserConfig
from rlinf.workers.engines.policy_batch import advantages_of
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles import (
    GenerationRequest,
    PartialStats,
    Sampling,
    Score,
    ScoredGroup,
    TrainerEngine,
)

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

VOCABULARY = 21
SAMPLING = Sampling(stop_ids=(2,), banned_ids=(0, 1))


def tiny(dtype=torch.float64):
    """In float64, so that sums in another order are equal to 1e-12."""
    return build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32)).to(dtype)


def scored_groups(model, count=8, *, sampling=SAMPLING, n=4, seed=0):
    """Groups of ragged lengths; every fourth has equal rewards, every third an unscored sample."""
    rng = np.random.default_rng(seed)
    asked = [
        GenerationRequest(
            f"{seed}.{i}", rng.integers(3, VOCABULARY, rng.integers(2, 9)), n, 9, sampling
        )
        for i in range(count)
    ]
    groups = {group.uid: group for group in TorchGenerate(model).generate(asked)}
    found = []
    for i, request in enumerate(asked):
        values = [0.5] * n if i % 4 == 3 else rng.random(n).tolist()
        scores = [
            Score(v, "unscored" if i % 3 == 0 and j == 1 else "scored")
            for j, v in enumerate(values)
        ]
        found.append(ScoredGroup.of(groups[request.uid], scores))
    return found


def stepped(groups, config, cuts=1, dtype=torch.float64, model=None):
    """The parameters after one step on `groups`, cut into so many calls."""
    trainer = TorchTrainer(model or tiny(dtype), config)
    for part in np.array_split(np.arange(len(groups)), cuts):
        trainer.accumulate([groups[i] for i in part])
    stats = trainer.finish_step()
    return trainer.state(), stats


def summed(trainer, groups):
    """The sums of a step on `groups`."""
    trainer.accumulate(groups)
    return trainer.finish_step().parts


def distance(one, two):
    return max(float((one[name] - two[name]).abs().max()) for name in one)


CONFIGS = {
    "token": TrainerConfig(),
    "sequence": TrainerConfig(normalisation=Normalisation("sequence"), advantage="rloo"),
    "constant": TrainerConfig(normalisation=Normalisation("constant", 9), advantage="dr_grpo"),
    "gspo": TrainerConfig(loss="gspo", normalisation=Normalisation("sequence")),
    "cispo": TrainerConfig(loss="cispo", clip=Clip(0.9, 0.3, None)),
    "dual": TrainerConfig(clip=Clip(0.2, 0.28, dual=3.0), old_logprobs="trainer"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_step_does_not_depend_on_how_the_batch_was_cut(name):
    groups = scored_groups(tiny())
    config = CONFIGS[name]
    whole, stats = stepped(groups, config)
    assert distance(whole, tiny().state_dict()) > 1e-6
    for cuts in (2, 4, 8):
        cut, other = stepped(groups, config, cuts)
        assert distance(whole, cut) < 1e-9
        assert other.metrics() == pytest.approx(stats.metrics(), rel=1e-6, abs=1e-9)
    limits = [
        {"micro_batch_tokens": 1},
        {"micro_batch_logits": 10 * VOCABULARY},
        {"min_batch_tokens": 0},
        {"min_batch_tokens": 10_000},
    ]
    for bounds in limits:
        cut, other = stepped(groups[::-1], dataclasses.replace(config, **bounds))
        assert distance(whole, cut) < 1e-9
        assert other.parts.rows == stats.parts.rows


def test_the_gradient_is_that_of_the_formula():
    """Against a forward pass of each row by itself, written down as in the papers."""
    model = tiny()
    groups = scored_groups(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(1)) * 0.02)
    total, tokens = 0.0, 0
    for scored in groups:
        group = scored.group
        rewards = torch.tensor(scored.rewards[scored.scored]).double()
        if rewards.max() == rewards.min():
            continue
        for i in np.flatnonzero(scored.scored):
            advantage = (float(scored.rewards[i]) - rewards.mean()) / (rewards.std() + 1e-4)
            response = torch.from_numpy(group.response(int(i))).long()
            ids = torch.cat([torch.from_numpy(group.prompt_ids).long(), response])
            logits = model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1].clone()
            logits[:, :2] = -torch.inf
            logprobs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            ratio = (logprobs - torch.from_numpy(group.logprobs[i, : len(response)])).exp()
            total = (
                total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
            )
            tokens += len(response)
    (total / tokens).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    trainer = TorchTrainer(model, TrainerConfig(clip=Clip(0.2, 0.28), min_batch_tokens=0))
    assert isinstance(trainer, TrainerEngine)
    parts = trainer.accumulate(groups)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad / parts.weight, gradients[name], atol=1e-6)
    assert parts.loss / parts.weight == pytest.approx(total.item() / tokens, rel=1e-5)
    assert parts.trained_tokens == parts.weight == tokens
    assert trainer.finish_step().grad_norm == pytest.approx(float(expected), rel=1e-5)


def test_what_there_is_to_count_is_counted():
    groups = scored_groups(tiny())
    trainer = TorchTrainer(tiny())
    trainer.accumulate(groups)
    parts = trainer.finish_step().parts
    # Groups 3 and 7 have equal rewards; groups 0, 3, 6 an unscored sample each.
    assert (parts.scored, parts.unscored, parts.dropped) == (29, 3, 2 + 8)
    assert parts.rows == 32 - parts.dropped
    assert parts.tokens == sum(group.token_count for group in groups)
    assert parts.reward == pytest.approx(sum(float(g.rewards[g.scored].sum()) for g in groups))
    assert parts.ratio_deviation < 1e-5
    assert parts.clipped == 0
    assert parts.kl < 1e-6
    assert PartialStats(rows=1, staleness=2) + PartialStats(rows=2, staleness=1) == PartialStats(
        rows=3, staleness=2
    )


def test_nothing_to_learn_from_changes_nothing():
    groups = scored_groups(tiny())
    trainer = TorchTrainer(tiny())
    equal = [dataclasses.replace(g, rewards=np.full_like(g.rewards, 1.1)) for g in groups]
    trainer.accumulate(equal)
    stats = trainer.finish_step()
    assert (stats.stepped, stats.version, stats.grad_norm) == (False, 0, 0.0)
    assert distance(trainer.state(), tiny().state_dict()) == 0
    trainer.accumulate(groups)
    assert trainer.finish_step().version == 1


def test_given_advantages_are_used_as_they_are():
    groups = scored_groups(tiny())
    given = [dataclasses.replace(g, advantages=np.full(4, 2.0, np.float32)) for g in groups]
    parts = summed(TorchTrainer(tiny()), given)
    assert parts.loss / parts.weight == pytest.approx(-2.0, rel=1e-5)
    assert parts.rows == 29


def test_the_kl_penalty_pulls_towards_the_reference():
    groups = scored_groups(tiny())
    config = TrainerConfig(kl_coefficient=0.1)
    with pytest.raises(ConfigError, match="reference_logprobs"):
        summed(TorchTrainer(tiny(), config), groups)
    same = [dataclasses.replace(g, reference_logprobs=g.group.logprobs) for g in groups]
    plain, _ = stepped(groups, TrainerConfig())
    held, stats = stepped(same, config)
    assert distance(plain, held) < 1e-4
    far = [dataclasses.replace(g, reference_logprobs=g.group.logprobs - 1) for g in groups]
    parts = summed(TorchTrainer(tiny(), config), far)
    extra = parts.loss / parts.weight - stats.parts.loss / stats.parts.weight
    assert extra == pytest.approx(0.1 * 0.5, rel=1e-3)


def test_log_probs_of_another_kind_are_refused():
    sampling = Sampling(stop_ids=(2,), top_p=0.9, logprobs="processed")
    groups = scored_groups(tiny(), sampling=sampling)
    with pytest.raises(ConfigError, match=r"top-k/top-p.*old_logprobs=trainer"):
        TorchTrainer(tiny()).accumulate(groups)
    config = TrainerConfig(old_logprobs="trainer")
    assert summed(TorchTrainer(tiny(), config), groups).ratio_deviation == 0


def test_the_ratio_is_that_of_the_tempered_policy():
    sampling = Sampling(temperature=0.6, banned_ids=(0, 5), stop_ids=(2,))
    groups = scored_groups(tiny(), sampling=sampling)
    assert summed(TorchTrainer(tiny()), groups).ratio_deviation < 1e-5


def test_staleness_is_the_distance_in_versions():
    groups = scored_groups(tiny())
    trainer = TorchTrainer(tiny())
    for expected in range(3):
        assert trainer.accumulate(groups).staleness == expected
        trainer.finish_step()


def test_samples_that_are_too_old_are_left_out_and_counted():
    """By sample, not by group: each has the version that it began with."""
    groups = [
        ScoredGroup.of(
            dataclasses.replace(s.group, versions=np.arange(4, dtype=np.int32)),
            [Score(float(r)) for r in range(4)],
        )
        for s in scored_groups(tiny(), 2)
    ]
    trainer = TorchTrainer(tiny(), TrainerConfig(max_staleness=1))
    first = summed(trainer, groups)
    assert (first.stale, first.rows, first.staleness) == (0, 8, 0)
    for version, stale in ((1, 0), (2, 2), (3, 4), (4, 6)):
        parts = summed(trainer, groups)
        assert (parts.stale, parts.dropped, parts.rows) == (stale, stale, 8 - stale), version
        assert parts.staleness == version
    assert summed(TorchTrainer(tiny()), groups).stale == 0


def test_stale_samples_count_for_the_advantages_of_the_others():
    group = scored_groups(tiny(), 1, n=4)[0].group
    old = ScoredGroup.of(
        dataclasses.replace(group, versions=np.array([-5, 0, 0, 0], np.int32)),
        [Score(float(r)) for r in range(4)],
    )
    given = dataclasses.replace(
        old, advantages=np.where([0, 1, 1, 1], advantages_of([old], "grpo")[0], 0)
    )
    config = TrainerConfig(max_staleness=2)
    bounded, _ = stepped([old], config)
    expected, _ = stepped([given], TrainerConfig())
    assert distance(bounded, expected) == 0


def test_only_the_last_layers_are_trained():
    groups = scored_groups(tiny())
    state, _ = stepped(groups, TrainerConfig(trainable_layers=1))
    before = tiny().state_dict()
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)
    trainer = TorchTrainer(tiny(), TrainerConfig(trainable_layers=1))
    assert set(trainer.state(trainable_only=True)) >= changed
    with pytest.raises(ConfigError, match="has 2 layers"):
        TorchTrainer(tiny(), TrainerConfig(trainable_layers=3))


def test_autocast_keeps_the_masters_and_comes_close():
    groups = scored_groups(tiny(torch.float32))
    exact = TorchTrainer(tiny(torch.float32), TrainerConfig(old_logprobs="trainer"))
    config = TrainerConfig(autocast="always", old_logprobs="trainer")
    fast = TorchTrainer(tiny(torch.float32), config)
    for trainer in (exact, fast):
        trainer.accumulate(groups)
    norms = [trainer.finish_step().grad_norm for trainer in (exact, fast)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert norms[1] != norms[0]
    assert {value.dtype for value in fast.state().values()} == {torch.float32}


def test_any_model_of_transformers_can_be_trained():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
                eos_token_id=2,
            )
        ).double()  # fmt: skip
    groups = scored_groups(model)
    config = TrainerConfig(micro_batch_tokens=60)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    whole, stats = stepped(groups, TrainerConfig(), model=model)
    whole = {name: value.clone() for name, value in whole.items()}
    assert stats.parts.ratio_deviation < 1e-4
    model.load_state_dict(initial)
    cut, _ = stepped(groups, config, cuts=3, model=model)
    assert distance(whole, cut) < 1e-8


def test_warm_up_raises_the_learning_rate():
    groups = scored_groups(tiny())
    trainer = TorchTrainer(tiny(), TrainerConfig(optimiser=OptimiserConfig(lr=1.0, warmup_steps=4)))
    rates = []
    for _ in range(6):
        trainer.accumulate([groups[3]])  # equal rewards: the step counts, but moves nothing
        rates.append(trainer.finish_step().lr)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_broken_gradient_is_refused_by_name():
    groups = scored_groups(tiny())
    broken = [dataclasses.replace(g, advantages=np.full(4, np.nan, np.float32)) for g in groups]
    trainer = TorchTrainer(tiny())
    trainer.accumulate(broken)
    with pytest.raises(NonFiniteGradient, match="gradient norm is nan"):
        trainer.finish_step()
    assert distance(trainer.state(), tiny().state_dict()) == 0
    trainer.accumulate(groups)
    assert trainer.finish_step().stepped


def test_offload_and_onload_do_not_change_the_next_steps():
    groups = scored_groups(tiny())
    config = TrainerConfig(min_batch_tokens=0)
    moved, still = TorchTrainer(tiny(), config), TorchTrainer(tiny(), config)
    sizes = set()
    for _ in range(3):
        for trainer in (moved, still):
            trainer.accumulate(groups[:4])
        moved.offload()
        moved.onload()
        for trainer in (moved, still):
            trainer.accumulate(groups[4:])
            trainer.finish_step()
        moved.offload()
        moved.onload()
        sizes.add(moved.resident_bytes())
        assert distance(moved.state(), still.state()) == 0
    parameters = sum(p.nbytes for p in moved.model.parameters())
    assert sizes == {3 * parameters}


def test_supervised_steps_learn_the_responses():
    model = tiny(torch.float32)
    trainer = TorchTrainer(model, TrainerConfig(micro_batch_tokens=40))
    pairs = [
        (np.array([a], np.int32), np.array([a, a + 1, 2][: 1 + a % 3], np.int32))
        for a in range(3, 15)
    ]
    config = OptimiserConfig(lr=1e-2, warmup_steps=2)
    losses = [trainer.sft_step(pairs, config) for _ in range(40)]
    assert losses[0] == pytest.approx(np.log(VOCABULARY), rel=0.1)
    assert losses[-1] < 0.5
    whole = TorchTrainer(tiny(torch.float32))
    assert whole.sft_step(pairs, config) == pytest.approx(losses[0], rel=1e-5)
    assert trainer.version == 0
    trainer.accumulate(scored_groups(model))
    with pytest.raises(ValueError, match="finish the policy step"):
        trainer.sft_step(pairs, config)

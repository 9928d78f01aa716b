import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlinf.comm import PeerLost
from rlinf.workers.algorithms.advantages import gae
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.engines.torch_critic import CriticConfig, TorchCritic
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles import CriticEngine, Group, Sampling, Score, ScoredGroup
from rlinf.workers.roles.rollout import FINISH_REASONS
from tests.workers.ranks import Ranks

torch.set_num_threads(1)

VOCABULARY = 21
SAMPLING = Sampling(banned_ids=(0, 1))


def tiny():
    return build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32)).double()


def gpt2():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        return GPT2LMHeadModel(config).double()


def scored_group(place, lengths, *, prompt=4, unscored=()):
    rng = np.random.default_rng(place)
    n, width = len(lengths), max(lengths)
    tokens = np.zeros((n, width), np.int32)
    for i, length in enumerate(lengths):
        tokens[i, :length] = rng.integers(2, VOCABULARY, length)
    group = Group(
        uid=str(place),
        prompt_ids=rng.integers(2, VOCABULARY, prompt).astype(np.int32),
        tokens=tokens,
        lengths=np.array(lengths, np.int32),
        logprobs=-rng.random((n, width)).astype(np.float32),
        finish=np.full(n, FINISH_REASONS.index("stop"), np.uint8),
        versions=np.zeros(n, np.int32),
        sampling=SAMPLING,
    )
    scores = [Score(rng.random(), "unscored" if i in unscored else "scored") for i in range(n)]
    return ScoredGroup.of(group, scores)


def ragged():
    shapes = [((3, 5, 1), 4, ()), ((6, 2), 7, (1,)), ((1, 1, 1, 1), 2, ()), ((4, 0, 3), 5, (2,))]
    return [
        scored_group(i, lengths, prompt=prompt, unscored=unscored)
        for i, (lengths, prompt, unscored) in enumerate(shapes)
    ]


def taught(critic, steps=1):
    for _ in range(steps):
        critic.estimate(ragged())
        critic.finish_step()
    return critic


def test_a_critic_is_made_without_drawing():
    model = tiny()
    before = torch.get_rng_state()
    TorchCritic(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [tiny, gpt2])
def test_a_value_is_read_where_the_token_is_predicted(make):
    """Against a forward pass of each row by itself, and the formula for its advantages."""
    config = CriticConfig(OptimiserConfig(lr=1e-2, warmup_steps=0), gamma=0.9, lam=0.7)
    critic = taught(TorchCritic(make(), config), steps=2)
    assert isinstance(critic, CriticEngine)
    for scored in critic.estimate(ragged()):
        group = scored.group
        for i, length in enumerate(group.lengths):
            advantages = torch.from_numpy(scored.advantages[i]).double()
            if not scored.scored[i] or not length:
                assert (advantages == 0).all()
                continue
            response = torch.from_numpy(group.response(i)).long()
            ids = torch.cat([torch.from_numpy(group.prompt_ids).long(), response])[None]
            with torch.no_grad():
                hidden = critic._model.base_model(ids).last_hidden_state
                values = critic._head(hidden)[0, len(group.prompt_ids) - 1 : -1, 0]
            rewards = torch.zeros(1, length, dtype=torch.float64)
            rewards[0, -1] = float(scored.rewards[i])
            expected, _ = gae(rewards, values[None], rewards + 1, gamma=0.9, lam=0.7)
            assert torch.allclose(advantages[:length], expected[0], atol=1e-6)
            assert (advantages[length:] == 0).all()


def test_the_first_advantages_are_the_rewards():
    for scored in TorchCritic(tiny()).estimate(ragged()):
        expected = np.where(scored.learnable, scored.rewards[:, None], 0)
        assert scored.advantages == pytest.approx(expected)


def test_the_step_does_not_depend_on_how_the_batch_was_cut():
    def stepped(order, micro_batch_tokens):
        critic = TorchCritic(tiny(), CriticConfig(micro_batch_tokens=micro_batch_tokens))
        given = ragged()
        for part in order:
            critic.estimate([given[i] for i in part])
        return critic.finish_step(), critic

    whole, first = stepped([[0, 1, 2, 3]], 10_000)
    for order, tokens in (([[3], [1, 0], [2]], 10_000), ([[0, 1, 2, 3]], 1)):
        cut, other = stepped(order, tokens)
        assert dataclasses.astuple(cut) == pytest.approx(dataclasses.astuple(whole), rel=1e-9)
        for name, value in first.state().items():
            assert torch.allclose(other.state()[name], value, atol=1e-9)


def test_values_are_learnt():
    critic = TorchCritic(tiny(), CriticConfig(OptimiserConfig(lr=3e-3)))
    first = taught_stats(critic)
    assert first.value == 0
    for _ in range(60):
        last = taught_stats(critic)
    assert last.loss < 0.1 * first.loss
    assert last.explained > max(0.4, first.explained)  # a prompt says nothing of its samples
    assert set(last.metrics()) == {"value_loss", "value_grad_norm", "value", "explained_variance"}


def taught_stats(critic):
    critic.estimate(ragged())
    return critic.finish_step()


def test_tokens_that_the_model_did_not_write_are_no_steps():
    """A document of a tool amid the response: same advantages as without, none for the document."""
    (plain,) = [scored_group(0, (4, 4))]
    written = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], bool)
    held = dataclasses.replace(plain, group=dataclasses.replace(plain.group, written=written))
    critic = TorchCritic(tiny(), CriticConfig(gamma=0.5))
    (found,) = critic.estimate([held])
    assert (found.advantages[~written] == 0).all()
    assert found.advantages[0, [0, 2, 3]] == pytest.approx(
        plain.rewards[0] * np.array([0.25, 0.5, 1])
    )
    assert found.advantages[1, 2] == pytest.approx(plain.rewards[1])
    assert critic.finish_step().tokens == written.sum()


def test_weights_of_a_policy_become_the_trunk():
    policy = build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32, seed=5)).double()
    critic = taught(TorchCritic(tiny()))
    critic.load_state({n: p.detach() for n, p in policy.named_parameters()}, 3)
    assert critic.version == 3
    for name, value in policy.named_parameters():
        assert torch.equal(critic.state()[name], value)


def test_what_was_saved_goes_on_as_if_nothing_had_happened():
    critic = taught(TorchCritic(tiny()), 2)
    tensors, numbers = critic.save()
    kept = {name: value.clone() for name, value in tensors.items()}
    other = TorchCritic(tiny())
    other.estimate(ragged())
    with pytest.raises(ValueError, match="finish the critic's step"):
        other.save()
    other.restore(kept, numbers)
    for _ in range(2):
        assert taught_stats(other) == taught_stats(critic)
    assert other.save()[1] == critic.save()[1]
    with pytest.raises(WeightsMismatch, match="value_head"):
        other.restore({n: t for n, t in kept.items() if "value_head" not in n}, numbers)


def test_offload_and_onload_change_nothing():
    moved, still = TorchCritic(tiny()), TorchCritic(tiny())
    for _ in range(3):
        taught(still)
        moved.estimate(ragged())
        moved.offload()
        moved.onload()
        moved.finish_step()
    for name, value in still.state().items():
        assert torch.equal(moved.state()[name], value)
    assert moved.resident_bytes() == still.resident_bytes() > 0


def test_ppo_whitens_the_advantages_of_the_whole_step():
    groups = taught(TorchCritic(tiny()), 3).estimate(ragged())
    config = TrainerConfig(advantage="gae", old_logprobs="trainer")
    parts = []
    for cuts in ([[0, 1, 2, 3]], [[2], [0, 3], [1]]):
        trainer = TorchTrainer(tiny(), config)
        for part in cuts:
            trainer.accumulate([groups[i] for i in part])
        parts.append(trainer.finish_step().parts)
    # The ratio is 1 and the mean advantage 0, so is the mean loss; every scored token counts.
    assert parts[0].loss / parts[0].weight == pytest.approx(0, abs=1e-6)
    assert parts[0].trained_tokens == sum(int(g.learnable.sum()) for g in groups)
    assert parts[1].loss == pytest.approx(parts[0].loss, abs=1e-6)
    assert parts[1].kl == pytest.approx(parts[0].kl, rel=1e-6)
    with pytest.raises(ConfigError, match="needs a critic"):
        trainer.accumulate(ragged())
        trainer.finish_step()


@pytest.fixture(scope="module")
def pair():
    with Ranks(2) as ranks:
        yield ranks


def part_of_steps(team, cut):
    """Two steps, each on some of the groups: the advantages, what each was, and what is kept."""
    critic = TorchCritic(tiny(), team=team)
    found = []
    for _ in range(2):
        groups = critic.estimate(ragged()[slice(*cut[team.rank])])
        advantages = {group.group.uid: group.advantages for group in groups}
        found.append((advantages, critic.finish_step()))
    return found, critic.save()


@pytest.mark.parametrize("cut", [((0, 2), (2, 4)), ((0, 4), (4, 4)), ((3, 4), (0, 3))])
def test_ranks_step_as_one(pair, cut):
    alone = TorchCritic(tiny())
    (one, saved), (other, nothing) = pair.run(part_of_steps, cut)
    for (advantages, stats), (more, same) in zip(one, other, strict=True):
        expected = {g.group.uid: g.advantages for g in alone.estimate(ragged())}
        for uid, found in (advantages | more).items():
            assert found == pytest.approx(expected.pop(uid), abs=1e-6)
        assert not expected
        step = dataclasses.astuple(alone.finish_step())
        assert dataclasses.astuple(stats) == dataclasses.astuple(same) == pytest.approx(step)
    tensors, numbers = alone.save()
    assert numbers == saved[1] == nothing[1] and nothing[0] == {}
    for name, tensor in tensors.items():
        assert torch.allclose(saved[0][name], tensor, atol=1e-9), name


def test_ranks_go_on_with_what_one_has_saved(pair):
    found = pair.run(gone_on)
    assert found[0] == found[1]


def gone_on(team):
    alone = taught(TorchCritic(tiny()), 2)
    critic = TorchCritic(tiny(), team=team)
    critic.restore(*alone.save())
    critic.estimate(ragged()[2 * team.rank : 2 * team.rank + 2])
    alone.estimate(ragged())
    stats, expected = critic.finish_step(), alone.finish_step()
    assert dataclasses.astuple(stats) == pytest.approx(dataclasses.astuple(expected))
    return dataclasses.astuple(stats)


def left_alone(team):
    """Rank 1 goes without a word, as if it had been killed."""
    if team.rank == 1:
        import torch.distributed as dist

        dist.destroy_process_group()
        return None
    try:
        team.gather(0)
    except PeerLost as error:
        return str(error)


def test_the_loss_of_a_mate_has_a_name(pair):
    alone, _ = pair.run(left_alone)
    assert alone.startswith("rank 0 of 2 has lost a mate: ")

"""Ours against verl, trl and torchrl on random inputs, and where they are wrong against the truth.

The numbers come from reference/reference.npz, written by reference/make.py with the versions named
in it. A gradient is that of the reduced loss with respect to the new log-probs.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.workers.algorithms.advantages import (
    gae,
    gae_stream,
    grpo,
    leave_one_out,
    reinforce_plus_plus,
    returns,
)
from rlinf.workers.algorithms.kl import kl
from rlinf.workers.algorithms.losses import (
    Clip,
    Normalisation,
    cispo,
    gspo,
    importance_weights,
    ppo_clip,
    reduce,
    value_loss,
)
from rlinf.workers.algorithms.masking import masked_whiten
from rlinf.workers.algorithms.shaping import Overlong, overlong_penalty
from rlinf.workers.engines.sampling import token_logprobs
from rlinf.workers.roles import Sampling

STORED = np.load(Path(__file__).with_name("reference") / "reference.npz")
GAMMA, LAM, GROUP = 0.9, 0.8, 4
NORMALISATIONS = {
    "token": Normalisation("token"),
    "sequence": Normalisation("sequence"),
    "constant": Normalisation("constant", 16),
}


def given(name):
    return torch.from_numpy(STORED[f"in/{name}"])


def same(ours, name):
    expected = torch.from_numpy(STORED[name]).to(ours.dtype).reshape(ours.shape)
    assert torch.allclose(ours.detach(), expected, rtol=0, atol=1e-6), name


def outcome(function):
    """`function` applied to groups, and flat again."""
    return function(given("rewards").view(-1, GROUP)).flatten()


def test_the_file_says_what_wrote_it():
    versions = json.loads(str(STORED["versions"]))
    assert (versions["verl"], versions["trl"]) == ("0.9.1", "1.16.0")
    assert versions["torchrl"]


def test_advantages_of_groups_are_those_of_verl():
    same(outcome(grpo), "verl/grpo")
    same(outcome(lambda rewards: grpo(rewards, scale=False)), "verl/dr_grpo")
    same(outcome(leave_one_out), "verl/rloo")


def test_advantages_of_tokens_are_those_of_verl():
    holes = given("holes")
    rewards = given("token_rewards") * holes
    same(reinforce_plus_plus(rewards, holes, GAMMA), "verl/reinforce_plus_plus")
    same(returns(rewards, holes, GAMMA), "verl/returns")
    advantages, targets = gae(rewards, given("values"), holes, gamma=GAMMA, lam=LAM)
    inside = holes.bool()
    whitened = torch.from_numpy(STORED["verl/gae_whitened"])
    assert torch.allclose(
        masked_whiten(advantages, holes)[inside], whitened[inside], rtol=0, atol=1e-6
    )
    expected = torch.from_numpy(STORED["verl/gae_targets"])
    assert torch.allclose(targets[inside], expected[inside], rtol=0, atol=1e-6)


def test_streams_of_environments_are_those_of_torchrl():
    rewards, values, following = given("stream")
    terminated, truncated = given("stream_ends")
    assert terminated.any() and truncated.any()
    advantages, targets = gae_stream(
        rewards, values, following, (terminated, truncated), gamma=GAMMA, lam=LAM
    )
    same(advantages, "torchrl/gae")
    same(targets, "torchrl/gae_targets")


def reduced(loss, normalisation):
    total, weight = reduce(loss, given("holes"), normalisation)
    return total / weight


def agrees(name, policy_loss, normalisation, extra=None):
    """The reduced loss and its gradient."""
    leaf = given("logprobs").requires_grad_()
    loss = policy_loss(leaf, given("old"), given("advantages")[:, None]).loss
    value = reduced(loss if extra is None else extra(loss, leaf), normalisation)
    value.backward()
    same(value, name)
    same(leaf.grad, f"{name}_grad")


def clipped(clip):
    return lambda new, old, advantages: ppo_clip(new, old, advantages, clip)


def sequence_clipped(new, old, advantages):
    return gspo(new, old, advantages, given("holes"), Clip(0.05, 0.08))


LOSSES = {
    "ppo": clipped(Clip(0.2, 0.2)),
    "clip_higher": clipped(Clip(0.2, 0.28)),
    "dual": clipped(Clip(0.2, 0.2, dual=1.5)),
    "gspo": sequence_clipped,
    "cispo": lambda new, old, advantages: cispo(new, old, advantages, Clip(1.0, 0.28)),
}


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_are_those_of_verl(name, kind):
    agrees(f"verl/{name}_{kind}", LOSSES[name], NORMALISATIONS[kind])


def test_the_correction_for_the_rollout_is_that_of_verl():
    weights = importance_weights(given("old"), given("reference"), cap=1.2)
    same(weights * given("holes"), "verl/importance_weights")
    for kind, normalisation in NORMALISATIONS.items():
        name = f"verl/corrected_{kind}"
        agrees(name, LOSSES["ppo"], normalisation, lambda loss, _: loss * weights)


@pytest.mark.parametrize(
    ("name", "loss", "kind"),
    [
        ("grpo", "ppo", "sequence"),
        ("dapo", "clip_higher", "token"),
        ("dr_grpo", "ppo", "constant"),
        ("delta", "dual", "token"),
        ("gspo", "gspo", "sequence"),
        ("cispo", "cispo", "token"),
    ],
)
def test_policy_losses_are_those_of_trl(name, loss, kind):
    agrees(f"trl/{name}", LOSSES[loss], NORMALISATIONS[kind])


def test_the_divergence_in_the_loss_is_that_of_trl():
    def penalised(loss, new):
        return loss + 0.1 * kl(new, given("reference"), "k3")

    agrees("trl/kl", LOSSES["ppo"], NORMALISATIONS["token"], penalised)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_divergences_are_those_of_verl(kind):
    leaf = given("logprobs").requires_grad_()
    each = kl(leaf, given("reference"), kind)
    each.sum().backward()
    same(each, f"verl/{kind}")
    same(leaf.grad, f"verl/{kind}_grad")


@pytest.mark.parametrize("clip", [0.3, None])
def test_the_value_loss_is_that_of_verl(clip):
    leaf = given("values").requires_grad_()
    old = leaf.detach() + 0.5 * given("old")
    value = reduced(value_loss(leaf, old, given("targets"), clip), Normalisation("token"))
    value.backward()
    name = f"verl/value_{1e9 if clip is None else clip:g}"
    same(value, name)
    same(leaf.grad, f"{name}_grad")


def test_log_probs_are_those_of_trl():
    logits, tokens = given("logits"), given("tokens")
    ours = token_logprobs(
        logits.flatten(0, 1), torch.arange(tokens.numel()), tokens.flatten(), Sampling()
    )
    same(ours, "trl/logprobs")


def test_the_penalty_of_long_responses_is_that_of_trl():
    same(overlong_penalty(given("overlong"), 100, Overlong(buffer=20)), "trl/overlong")


# -- where they are wrong ----------------------------------------------------------------------


def test_verl_gives_equal_rewards_an_advantage():
    assert (STORED["wrong/verl_equal_rewards"] < -0.1).all()
    assert torch.equal(grpo(torch.full((1, 10), 1.1)), torch.zeros(1, 10))


def test_verl_gives_a_group_of_one_its_reward_as_its_advantage():
    assert STORED["wrong/verl_group_of_one"] == pytest.approx(1.0)
    assert grpo(torch.ones(1, 1)).item() == 0


def test_verl_loses_a_reward_on_a_masked_token():
    assert (STORED["wrong/verl_lost_reward"] == 0).all()
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 1, 0]])
    advantages, _ = gae(rewards, torch.zeros(1, 3), mask, lam=1.0)
    assert advantages.tolist() == [[1.0, 1.0, 0.0]]


def test_verl_has_value_targets_at_masked_positions():
    assert STORED["wrong/verl_masked_target"][0, 2] == pytest.approx(100.0)
    _, targets = gae(
        torch.tensor([[0.0, 1.0, 0.0]]),
        torch.tensor([[0.0, 0.0, 100.0]]),
        torch.tensor([[1, 1, 0]]),
        lam=0.95,
    )
    assert targets[0, 2] == 0


def test_verl_lets_a_far_token_go():
    assert STORED["wrong/verl_k3"] == 10
    assert STORED["wrong/verl_k3_grad"] == 0
    far = torch.tensor([-29.0], requires_grad=True)
    kl(far, torch.zeros(1), "k3").sum().backward()
    assert -150 < far.grad.item() < -100


def test_verl_divides_by_the_padding_unless_told_otherwise():
    narrow, wide = STORED["wrong/verl_constant"], STORED["wrong/verl_constant_padded"]
    assert narrow == pytest.approx(1.0) and wide == pytest.approx(3 / 8)
    with pytest.raises(ValueError, match="constant"):
        reduce(torch.ones(2, 3), torch.ones(2, 3), Normalisation("constant"))


def test_trl_counts_a_row_that_is_masked_throughout():
    empty = given("empty_row")
    loss = ppo_clip(given("logprobs"), given("old"), given("advantages")[:, None]).loss
    total, rows = reduce(loss, empty, Normalisation("sequence"))
    assert (len(empty), rows.item()) == (8, 7)
    assert STORED["wrong/trl_empty_row"] == pytest.approx(total.item() / 8)
    assert abs(total.item() / 7 - total.item() / 8) > 1e-3


def test_trl_overflows_on_far_tokens():
    assert not np.isfinite(STORED["wrong/trl_k3"])
    assert not np.isfinite(STORED["wrong/trl_ratio"])
    far = torch.full((2, 3), -800.0, requires_grad=True)
    loss = ppo_clip(far + 1600, far.detach(), torch.ones(2, 1)).loss + kl(far, far * 0, "k3")
    loss.sum().backward()
    assert loss.isfinite().all() and far.grad.isfinite().all()

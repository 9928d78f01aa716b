"""What must hold for any batch: hypothesis looks for one where it does not."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.workers.algorithms.advantages import gae, reinforce_plus_plus, returns
from rlinf.workers.algorithms.functions import GROUP_ADVANTAGES, POLICY_LOSSES
from rlinf.workers.algorithms.kl import kl
from rlinf.workers.algorithms.losses import Normalisation, importance_weights, reduce, value_loss
from rlinf.workers.algorithms.masking import masked_mean, masked_sum, masked_whiten, row_means
from rlinf.workers.algorithms.registry import ALGORITHMS
from rlinf.workers.algorithms.shaping import informative

ROWS, LENGTH, WIDTH = 8, 6, 5
NORMALISATIONS = (
    Normalisation("token"),
    Normalisation("sequence"),
    Normalisation("constant", constant=7),
)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64)
quick = settings(max_examples=20, deadline=None)


def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def as_bits(rows):
    return (torch.tensor(rows)[:, None] >> torch.arange(LENGTH)) % 2 == 1


masks = st.lists(st.integers(0, 2**LENGTH - 1), min_size=ROWS, max_size=ROWS).map(as_bits)
seeds = st.integers(0, 2**20)
cuts = st.tuples(
    st.permutations(range(ROWS)), st.sets(st.integers(1, ROWS - 1)), st.sampled_from([1, 2, 4])
)


def cut_gradient(seed, mask, names, cut, dtype):
    """The gradient of a step on micro-batches over ranks, summed and divided once."""
    loss_name, normalisation = names
    order, borders, ranks = cut
    shapes = ((WIDTH,), (ROWS, LENGTH, WIDTH), (ROWS, LENGTH), (ROWS, 1))
    weight, inputs, old, advantages = (
        normal(seed + i, *shape).to(dtype) for i, shape in enumerate(shapes)
    )
    edges = [0, *sorted(borders), ROWS]
    batches = [list(order[a:b]) for a, b in itertools.pairwise(edges)]
    gradients, divisor = [], torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        leaf = weight.clone().requires_grad_()
        for rows in batches[rank::ranks]:
            new = inputs[rows] @ leaf
            loss = POLICY_LOSSES[loss_name](new, old[rows], advantages[rows], mask[rows], None).loss
            loss = loss + 0.1 * kl(new, old[rows], "k2")
            total, part = reduce(loss, mask[rows], normalisation)
            total.backward()
            divisor += part
        gradients.append(torch.zeros_like(weight) if leaf.grad is None else leaf.grad)
    return sum(gradients) / divisor.clamp(min=1)


@pytest.mark.parametrize("normalisation", NORMALISATIONS, ids=lambda n: n.kind)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
@quick
@given(seed=seeds, mask=masks, cut=cuts)
def test_the_gradient_does_not_depend_on_the_cut(loss, normalisation, seed, mask, cut):
    whole = (list(range(ROWS)), set(), 1)
    names = (loss, normalisation)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        expected = cut_gradient(seed, mask, names, whole, dtype)
        found = cut_gradient(seed, mask, names, cut, dtype)
        scale = 1 + float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=0, atol=tolerance * scale)


def token_results(x, mask):
    """Everything that is computed for tokens, from five matrices [rows, T] and a mask."""
    a, b, c, rewards, values = x
    advantages, targets = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    found = {
        "returns": returns(rewards, mask, 0.9),
        "gae": advantages,
        "targets": targets,
        "reinforce++": reinforce_plus_plus(rewards, mask, 0.9),
        "whitened": masked_whiten(a, mask),
        "kl": kl(a, b, "k3"),
        "weights": importance_weights(a, b),
        "value": value_loss(a, b, c, 0.2),
    }
    for name, loss in POLICY_LOSSES.items():
        found[name] = loss(a, b, c, mask, None).loss
    return found


def reductions(loss, mask):
    return {n.kind: torch.stack(reduce(loss, mask, n)) for n in NORMALISATIONS} | {
        "mean": masked_mean(loss, mask),
        "row means": row_means(loss, mask)[0],
    }


@quick
@given(seed=seeds, mask=masks, places=st.lists(st.integers(0, LENGTH), min_size=1, max_size=4))
def test_inserted_masked_tokens_change_nothing(seed, mask, places):
    """Whatever lies under the mask: NaN included, except where a reward or a log-prob must be."""
    x = normal(seed, 5, ROWS, LENGTH)
    x[3] = torch.where(mask, x[3], 0)  # a reward under the mask is moved, not ignored
    kept = torch.ones(LENGTH + len(places), dtype=torch.bool)
    for count, place in enumerate(sorted(places)):
        kept[place + count] = False
    wide = torch.full((5, ROWS, len(kept)), torch.nan, dtype=torch.float64)
    wide[3] = 0
    wide[..., kept] = x
    wide_mask = torch.zeros(ROWS, len(kept), dtype=torch.bool)
    wide_mask[:, kept] = mask
    before, after = token_results(x, mask), token_results(wide, wide_mask)
    for name, value in before.items():
        inserted = after[name][:, kept]
        assert torch.allclose(inserted[mask], value[mask], rtol=1e-12, atol=1e-12), name
        narrow, padded = reductions(value, mask), reductions(after[name], wide_mask)
        for kind, total in narrow.items():
            assert torch.allclose(total, padded[kind], rtol=1e-12, atol=1e-12), (name, kind)


@quick
@given(seed=seeds, mask=masks)
def test_a_mask_may_be_of_any_dtype(seed, mask):
    x = normal(seed, 5, ROWS, LENGTH)
    x[3] = torch.where(mask, x[3], 0)
    expected = token_results(x, mask) | reductions(x[0], mask)
    for dtype in MASK_DTYPES:
        other = mask.to(dtype)
        found = token_results(x, other) | reductions(x[0], other)
        assert torch.equal(masked_sum(x[0], other), masked_sum(x[0], mask))
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, dtype)


@quick
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    n=st.integers(1, 20),
    unscored=st.sets(st.integers(0, 19), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_equal_raw_rewards_give_exactly_zero(reward, n, unscored, dtype):
    rewards = torch.full((3, n), reward, dtype=dtype)
    scored = torch.ones(3, n)
    for place in unscored:
        if place < n:
            rewards[:, place], scored[:, place] = torch.nan, 0
    for name, advantage in GROUP_ADVANTAGES.items():
        assert torch.equal(advantage(rewards, scored), torch.zeros_like(rewards)), name
    assert not informative(rewards, scored).any()


@quick
@given(seed=seeds, n=st.integers(2, 12), shift=st.floats(-100, 100))
def test_group_advantages_sum_to_zero_and_ignore_a_constant(seed, n, shift):
    rewards = normal(seed, 4, n)
    scored = torch.ones(4, n)
    for name, advantage in GROUP_ADVANTAGES.items():
        found = advantage(rewards, scored)
        assert torch.allclose(found.sum(-1), torch.zeros(4).double(), atol=1e-9), name
        assert torch.allclose(advantage(rewards + shift, scored), found, atol=1e-9), name
    assert informative(rewards, scored).all()


def test_the_registry_names_only_what_there_is():
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.loss in POLICY_LOSSES, name
        assert algorithm.advantage in {*GROUP_ADVANTAGES, "gae", "reinforce++"}, name
        assert algorithm.settings()["advantage"] == algorithm.advantage
    assert {"ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo"} <= set(ALGORITHMS)

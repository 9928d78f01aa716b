from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.workers.engines.sampling import draw, streams, token_logprobs, uniforms
from rlinf.workers.roles import Sampling


def random_of(uid, samples, positions, seed=0):
    return np.stack(
        [uniforms(streams(seed, uid, samples), np.full(samples, p)) for p in range(positions)]
    )


def test_random_numbers_are_uniform_and_belong_to_a_token():
    first = random_of("a", 64, 256)
    assert first.dtype == np.float32
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.01
    assert abs(first.var() - 1 / 12) < 0.003
    counts = np.histogram(first, bins=16, range=(0, 1))[0] / first.size
    assert np.abs(counts - 1 / 16).max() < 0.01
    assert np.array_equal(first[:, :8], random_of("a", 8, 256))
    for other in (random_of("b", 64, 256), random_of("a", 64, 256, seed=1)):
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.03
    assert np.abs(np.corrcoef(first.T) - np.eye(64)).max() < 0.35
    assert len(np.unique(first)) > 0.99 * first.size


def drawn(logits, sampling, count=20_000):
    random = torch.from_numpy(random_of("x", count, 1)[0])
    return draw(logits.expand(count, -1), sampling, random)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature):
    logits = torch.tensor([[1.0, 0.0, -2.0, 3.0, 0.5]])
    tokens, logprobs = drawn(logits, Sampling(temperature=temperature))
    expected = (logits[0] / temperature).softmax(-1)
    seen = torch.bincount(tokens, minlength=5) / len(tokens)
    assert (seen - expected).abs().max() < 0.01
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_banned_tokens_have_no_share():
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    tokens, logprobs = drawn(logits, Sampling(banned_ids=(0,)))
    assert not (tokens == 0).any()
    assert torch.allclose(logprobs, logits[0, 1:].log_softmax(-1)[tokens - 1], atol=1e-6)


def test_the_extremes_of_the_random_number_draw_possible_tokens():
    logits = torch.full((2, 6), -torch.inf)
    logits[:, [2, 4]] = torch.tensor([0.3, 0.1])
    tokens, logprobs = draw(logits, Sampling(), torch.tensor([0.0, 1 - 2.0**-23]))
    assert tokens.tolist() == [2, 4]
    assert logprobs.isfinite().all()
    wide = torch.randn(64, 50_000, generator=torch.manual_seed(0)) * 3
    tokens, logprobs = draw(wide, Sampling(), torch.full((64,), 1 - 2.0**-23))
    assert (tokens < 50_000).all()


@pytest.mark.parametrize("columns", [257, 384, 5000])
def test_a_large_vocabulary_is_drawn_from_as_a_small_one(columns):
    logits = torch.randn(200, columns, generator=torch.manual_seed(0)) * 2
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(200, generator=torch.manual_seed(1))
    uniform[:2] = torch.tensor([0.0, 1 - 2.0**-23])
    tokens, logprobs = draw(logits, Sampling(), uniform)
    exact = logits.double().softmax(-1)
    assert torch.allclose(logprobs, exact.gather(1, tokens[:, None])[:, 0].log().float(), atol=1e-5)
    below = (
        exact.cumsum(-1).gather(1, tokens[:, None])[:, 0] - exact.gather(1, tokens[:, None])[:, 0]
    )
    assert (below <= uniform + 1e-5).all()
    assert (below + logprobs.exp() >= uniform - 1e-5).all()


def test_greedy_takes_the_likeliest_and_records_temperature_one():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    tokens, logprobs = draw(logits, Sampling(temperature=0), torch.zeros(2))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.9), [0, 1, 2]),
        (Sampling(top_p=0.3), [0]),
        (Sampling(top_k=3, top_p=0.6), [0, 1]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
        (Sampling(min_p=0.4), [0, 1, 2]),
        (Sampling(min_p=1.0), [0]),
        (Sampling(top_p=0.9, min_p=0.6), [0, 1]),
    ],
)
def test_truncation_keeps_the_likeliest(sampling, kept):
    probabilities = torch.tensor([[0.4, 0.35, 0.2, 0.05]])
    tokens, full = drawn(probabilities.log(), sampling)
    assert sorted(set(tokens.tolist())) == kept
    assert torch.allclose(full, probabilities[0].log()[tokens], atol=1e-5)
    processed = replace(sampling, logprobs="processed")
    same, logprobs = drawn(probabilities.log(), processed)
    assert torch.equal(same, tokens)
    mass = probabilities[0, kept].sum()
    assert torch.allclose(logprobs, (probabilities[0] / mass).log()[tokens], atol=1e-5)


def test_the_trainer_computes_what_the_rollout_recorded():
    logits = torch.randn(32, 11, generator=torch.manual_seed(1))
    sampling = Sampling(temperature=0.7, banned_ids=(3, 4), top_p=0.8)
    tokens, recorded = draw(logits, sampling, torch.rand(32))
    computed = token_logprobs(logits, torch.arange(32), tokens, sampling)
    assert torch.allclose(computed, recorded, atol=1e-6)


def test_settings_that_make_no_sense_are_refused():
    for bad in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"top_p": 1.1}, {"min_p": 2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)

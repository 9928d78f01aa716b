"""The forward pass of our own against that of transformers."""

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlinf.workers.engines.backbone import TransformersBackbone, backbone_of
from rlinf.workers.engines.decoder import Decoder, reason_unsupported
from rlinf.workers.engines.prefix_batch import PrefixBatch

torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time

SIZES = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
}


def qwen(**changes):
    return Qwen2ForCausalLM(
        Qwen2Config(**SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True} | changes)
    )


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 2} | changes))


def qwen3(**changes):
    own = {"num_key_value_heads": 2, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | own | changes))


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=23, n_positions=640, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip


def prepared(make, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.15)
    return model.to(dtype)


def rows(*shapes, seed=0):
    """(prompt length, samples, longest response) each."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, 23, prompt).astype(np.int32),
            rng.integers(0, 23, (n, longest)).astype(np.int32),
            rng.integers(1, longest + 1, n).astype(np.int32),
        )
        for prompt, n, longest in shapes
    ]


def expected_logits(model, groups):
    """Each response by itself through the module: the logits that predict its tokens."""
    found = []
    for prompt, tokens, lengths in groups:
        for row, length in zip(tokens, lengths, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, row[:length]])).long()[None]
            found.append(model(ids).logits[0, len(prompt) - 1 : -1])
    return torch.cat(found).float()


MODELS = {"qwen2": qwen, "qwen3": qwen3, "llama": llama, "gpt2": gpt2}
BATCHES = {
    "even": [(7, 4, 1), (7, 4, 1)],
    "ragged": [(5, 3, 4), (9, 2, 6), (1, 5, 3)],
    "one token each": [(3, 2, 1), (4, 3, 1)],
    "long": [(270, 2, 40), (30, 1, 300)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_the_modules_own(name, batch):
    model = prepared(MODELS[name])
    backbone = backbone_of(model)
    assert isinstance(backbone, TransformersBackbone if name == "gpt2" else Decoder)
    groups = rows(*BATCHES[batch])
    laid_out = PrefixBatch.of(groups)
    logits, source = backbone.logits(laid_out)
    expected = expected_logits(model, groups)
    assert torch.allclose(logits[source], expected, atol=2e-5)

    weights = torch.randn(expected.shape, generator=torch.manual_seed(5))
    (logits[source] * weights).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (expected_logits(model, groups) * weights).sum().backward()
    for mine, theirs in zip(ours, (p.grad for p in model.parameters()), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3 * float(theirs.abs().max()) + 1e-6)


def test_a_shared_prompt_is_computed_once():
    groups = rows((7, 16, 5), (7, 16, 5))
    batch = PrefixBatch.of(groups)
    responses = sum(int(lengths.sum()) for _, _, lengths in groups)
    assert len(batch.targets) == responses
    assert len(batch.tokens) == 2 * 7 + responses - 32
    assert batch.row_token_count == 32 * 7 + responses


@pytest.mark.parametrize("name", MODELS)
def test_decoding_against_a_cache_equals_reading_it_all(name):
    model = prepared(MODELS[name])
    backbone = backbone_of(model)
    prompts = [prompt for prompt, _, _ in rows((5, 1, 1), (9, 1, 1), (1, 1, 1))]
    logits, cache = backbone.prefill(prompts)
    chosen = torch.tensor([0, 0, 2, 1])
    sequences = [prompts[i].tolist() for i in chosen]
    cache, logits = cache.select(chosen, 3), logits[chosen]
    for step in range(80):
        if step == 40:
            keep = torch.tensor([3, 1])
            cache, logits = cache.select(keep, 40), logits[keep]
            sequences = [sequences[i] for i in keep]
        tokens = (logits.argmax(-1) + torch.arange(len(logits))) % 23
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        logits = backbone.decode(tokens, cache)
    assert cache.rows == 2
    for row, sequence in enumerate(sequences):
        whole = model(torch.tensor([sequence])).logits[0, -1]
        assert torch.allclose(logits[row], whole, atol=5e-5)


def test_rows_can_join_while_others_are_decoded():
    model = prepared(llama)
    decoder = Decoder(model)
    first, second = (prompt for prompt, _, _ in rows((6, 1, 1), (3, 1, 1)))
    _, cache = decoder.prefill([first])
    cache = cache.select(torch.tensor([0]), 10)
    decoder.decode(torch.tensor([4]), cache)
    _, late = decoder.prefill([second])
    both = cache.join(late.select(torch.tensor([0, 0]), 10))
    logits = decoder.decode(torch.tensor([5, 6, 7]), both)
    for row, sequence in enumerate(([*first, 4, 5], [*second, 6], [*second, 7])):
        whole = model(torch.tensor(np.array(sequence))[None]).logits[0, -1]
        assert torch.allclose(logits[row], whole, atol=2e-5)


def test_half_precision_stays_close_to_the_module():
    model = prepared(llama, torch.bfloat16)
    groups = rows((5, 3, 4), (9, 2, 6))
    logits, source = Decoder(model).logits(PrefixBatch.of(groups))
    expected = expected_logits(model, groups)
    assert logits.dtype == torch.float32
    assert (logits[source] - expected).abs().max() < 0.03 * expected.abs().max()


def test_frozen_layers_get_no_gradient():
    model = prepared(qwen)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    logits, _ = Decoder(model).logits(PrefixBatch.of(rows((5, 3, 4))))
    logits.sum().backward()
    assert all(p.grad is not None for p in model.model.layers[1].parameters())
    assert all(p.grad is None for p in model.model.layers[0].parameters())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (gpt2, "none of Llama, Qwen2 and Qwen3"),
        (lambda: llama(hidden_act="gelu"), "activation is gelu"),
        (lambda: llama(attention_dropout=0.1), "dropout"),
        (lambda: qwen(use_sliding_window=True, max_window_layers=1, sliding_window=4), "kinds"),
    ],
)
def test_what_it_cannot_run_is_left_to_transformers(make, why):
    model = make()
    assert why in reason_unsupported(model)
    assert isinstance(backbone_of(model), TransformersBackbone)
    with pytest.raises(ValueError, match=why):
        Decoder(model)

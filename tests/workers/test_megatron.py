"""The megatron engine on two ranks does what the plain one does on one."""

import dataclasses

import pytest
import torch

from rlinf.workers.engines.trainer_config import Parallel
from tests.workers.ranks import Ranks
from tests.workers.test_fsdp import (
    CONFIG,
    STEPS,
    VOCABULARY,
    alone,
    assert_same,
    tiny,
    train,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


def llama(kind="Llama", **changes):
    """Grouped queries, an odd vocabulary, heads that are not hidden / heads wide for Qwen3."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are not to be 0 and 1
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.double().eval()


def qwen3():
    return llama("Qwen3", head_dim=16)


def qwen2():
    return llama("Qwen2")


MODELS = {"tied": tiny, "llama": llama, "qwen2": qwen2, "qwen3": qwen3}
WAYS = {
    "tensor": Parallel(tensor=2),
    "pipeline": Parallel(pipeline=2),
    "copies": Parallel(),
}


def train_together(team, config, steps, name):
    from rlinf.workers.engines import megatron

    engine = megatron.make(MODELS[name](), config, team)
    return train(engine, steps, lambda groups: groups[team.rank :: team.size])


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_step_as_one_process_does(two, way, name):
    config = dataclasses.replace(CONFIG, parallel=WAYS[way], micro_batch_tokens=100)
    results = two.run(train_together, config, STEPS, name)
    # Rotary angles are in float32, and so are the norms inside of transformers' own Qwen3.
    tolerance = 1e-4 if name == "qwen3" else 1e-6
    assert_same(results[0], alone(CONFIG, STEPS, MODELS[name]), tolerance)
    assert results[1][0] == results[0][0], "every rank knows what the step was"
    assert results[1][1] == {}, "rank 0 alone has the whole weights"

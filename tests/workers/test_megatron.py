"""The megatron engine on two ranks does what the plain one does on one."""

import dataclasses

import pytest
import torch

from rlinf.workers.engines import megatron
from rlinf.workers.engines.lora import Lora
from rlinf.workers.engines.megatron_layout import shape_of
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.engines.trainer_config import Parallel
from rlinf.workers.errors import ConfigError
from rlinf.workers.team import Team
from tests.workers.ranks import Ranks
from tests.workers.test_fsdp import (
    CONFIG,
    STEPS,
    VOCABULARY,
    alone,
    assert_same,
    gpt2,
    read,
    tiny,
    train,
    write,
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
    engine = megatron.make(MODELS[name](), config, team)
    return train(engine, steps, lambda groups: groups[team.rank :: team.size], team)


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


def train_and_write(team, folder, way, name):
    config = dataclasses.replace(CONFIG, parallel=way)
    engine = megatron.make(MODELS[name](), config, team)
    train(engine, STEPS[:2], lambda groups: groups[team.rank :: team.size], team)
    write(engine, folder, team.rank)


def read_and_train(team, folder, way, name):
    engine = megatron.make(MODELS[name](), dataclasses.replace(CONFIG, parallel=way), team)
    read(engine, folder)
    return train(engine, STEPS[2:], lambda groups: groups[team.rank :: team.size], team)


@pytest.mark.parametrize("name", ["tied", "llama"])
def test_a_checkpoint_goes_on_in_any_layout_and_with_any_engine(two, tmp_path, name):
    metrics, state = alone(CONFIG, STEPS, MODELS[name])
    expected = (metrics[2:], state)
    for way in WAYS.values():
        folder = tmp_path / f"{way.tensor}{way.pipeline}"
        folder.mkdir()
        two.run(train_and_write, folder, way, name)
        plain = TorchTrainer(MODELS[name](), CONFIG)
        read(plain, folder)
        assert_same(train(plain, STEPS[2:]), expected, 1e-6)
        for other in WAYS.values():
            assert_same(two.run(read_and_train, folder, other, name)[0], expected, 1e-6)


PARTLY = {
    "adapters": {"lora": Lora(rank=4, alpha=8.0)},
    "some adapters": {"lora": Lora(rank=4, alpha=8.0, targets=("k_proj", "down_proj"))},
    "last layer": {"trainable_layers": 1},
}


@pytest.mark.parametrize("part", PARTLY)
@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_learn_stays_and_the_rest_learns_as_ever(two, way, part):
    pytest.importorskip("peft", reason="peft is not installed")
    plain = dataclasses.replace(CONFIG, **PARTLY[part])
    config = dataclasses.replace(plain, parallel=WAYS[way], micro_batch_tokens=100)
    assert_same(
        two.run(train_together, config, STEPS, "qwen2")[0], alone(plain, STEPS, qwen2), 1e-6
    )


def train_and_write_adapters(team, folder):
    engine = megatron.make(qwen2(), ADAPTERS, team)
    train(engine, STEPS[:2], lambda groups: groups[team.rank :: team.size], team)
    write(engine, folder, team.rank)


ADAPTERS = dataclasses.replace(CONFIG, parallel=Parallel(tensor=2), **PARTLY["adapters"])


def test_adapters_go_on_with_another_engine(two, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    two.run(train_and_write_adapters, tmp_path)
    plain = TorchTrainer(qwen2(), ADAPTERS)
    read(plain, tmp_path)
    metrics, state = alone(ADAPTERS, STEPS, qwen2)
    assert_same(train(plain, STEPS[2:]), (metrics[2:], state), 1e-6)


def single():
    return qwen2().float()


def train_single_together(team, config, steps):
    engine = megatron.make(single(), config, team)
    return train(engine, steps, lambda groups: groups[team.rank :: team.size], team)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_near_and_keeps_the_parameters(two, way):
    fast = dataclasses.replace(CONFIG, autocast="always", old_logprobs="trainer")
    ways = dataclasses.replace(fast, parallel=WAYS[way])
    metrics, state = two.run(train_single_together, ways, STEPS[:1])[0]
    [exact], _ = alone(dataclasses.replace(fast, autocast=False), STEPS[:1], single)
    assert all(value.dtype == torch.float32 for value in state.values())
    assert metrics[0]["grad_norm"] != exact["grad_norm"]
    assert metrics[0]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.03)


@pytest.mark.slow
def test_tensor_and_pipeline_together():
    config = dataclasses.replace(CONFIG, parallel=Parallel(2, 2), micro_batch_tokens=100)
    with Ranks(4) as four:
        for name in ("tied", "llama"):
            found = four.run(train_together, config, STEPS, name)[0]
            assert_same(found, alone(CONFIG, STEPS, MODELS[name]), 1e-6)


def test_one_rank_is_one_process():
    team = Team()
    config = dataclasses.replace(CONFIG, activation_checkpointing=True)
    engine = megatron.make(llama(), config, team)
    assert_same(train(engine, STEPS), alone(CONFIG, STEPS, llama), 1e-6)
    before = engine.resident_bytes()
    engine.offload()
    engine.onload()
    assert engine.resident_bytes() == before > 0
    team.close()


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        (gpt2, {}, "GPT2LMHeadModel is none of Llama"),
        (lambda: llama(hidden_act="gelu"), {}, "its activation is gelu"),
        (lambda: llama(attention_bias=True), {}, "biases"),
        (
            lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0}),
            {},
            "rotary embedding is linear",
        ),
        (llama, {"parallel": Parallel(tensor=2)}, "no multiple of the 2 x 1 ranks"),
        (llama, {"trainable_layers": 3}, "the model has 2 layers"),
    ],
)
def test_what_it_cannot_do_is_said(model, changes, why):
    team = Team()
    with pytest.raises(ConfigError, match=why):
        megatron.make(model(), dataclasses.replace(CONFIG, **changes), team)
    team.close()


def test_a_model_that_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="2 key heads cannot be shared equally by 4 ranks"):
        shape_of(llama(), 4, 1)
    with pytest.raises(ConfigError, match="2 layers cannot be shared equally by 3 ranks"):
        shape_of(llama(), 1, 3)

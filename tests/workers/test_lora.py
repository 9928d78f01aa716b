"""Low-rank adapters: what learns, what is published, what is saved."""

import numpy as np
import pytest
import torch

from rlinf.workers.engines.lora import Lora, adapt, merged
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.parameters import state_of
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.errors import ConfigError
from tests.workers.test_fsdp import LORA, STEPS, tiny, train

pytest.importorskip("peft", reason="peft is not installed")


def test_adapters_begin_as_nothing_and_alone_learn():
    plain = state_of(tiny())
    trainer = TorchTrainer(tiny(), LORA)
    assert all(torch.equal(plain[name], value) for name, value in trainer.state().items())
    assert plain.keys() == trainer.state().keys()
    before = {name: value.clone() for name, value in state_of(trainer.model).items()}
    train(trainer, STEPS)
    moved = {n for n, value in state_of(trainer.model).items() if not torch.equal(before[n], value)}
    assert moved == set(trainer.state(trainable_only=True))
    assert all(".lora_" in name for name in moved) and len(moved) == 2 * 2 * 7
    published = {n for n, value in trainer.state().items() if not torch.equal(plain[n], value)}
    assert published == {n for n in plain if n.endswith("_proj.weight")}


def test_what_is_published_computes_what_is_trained():
    trainer = TorchTrainer(tiny(), LORA)
    train(trainer, STEPS)
    other = tiny()
    other.load_state_dict(dict(trainer.state()), strict=False)
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected, found = trainer.model(tokens).logits, other(tokens).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(tiny()(tokens).logits, expected, rtol=0, atol=1e-3)


def test_a_saved_trainer_goes_on():
    one, other = TorchTrainer(tiny(), LORA), TorchTrainer(tiny(), LORA)
    train(one, STEPS[:2])
    tensors, numbers = one.save()
    other.restore({name: value.clone() for name, value in tensors.items()}, numbers)
    assert train(one, STEPS[2:])[0] == train(other, STEPS[2:])[0]


def test_supervised_steps_train_adapters_too():
    trainer = TorchTrainer(tiny(), LORA)
    pair = (np.array([3, 4], np.int32), np.array([5, 6, 7], np.int32))
    losses = [trainer.sft_step([pair], OptimiserConfig(lr=1e-2)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_in_bfloat16_the_sum_is_rounded_once():
    model = tiny(torch.bfloat16)
    adapt(model, LORA.lora)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".lora_" in name:
                value.normal_(generator=torch.manual_seed(0))
    state = state_of(model)
    prefix = "model.layers.0.mlp.up_proj"
    a, b = (state[f"{prefix}.lora_{part}.default.weight"].double() for part in "AB")
    exact = state[f"{prefix}.base_layer.weight"].double() + 2 * b @ a
    found = merged(state, LORA.lora)[f"{prefix}.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-6)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: .*nothing"):
        TorchTrainer(tiny(), TrainerConfig(lora=Lora(targets=("nothing",))))
    with pytest.raises(ValueError, match="set one of them"):
        TrainerConfig(lora=Lora(), trainable_layers=1)

"""Checkpoints with OpenVLA's interface, on a small random model: tower, projector, Llama."""

import warnings

import numpy as np
import pytest
import torch

from rlinf.workers.engines.hf_vla import HfVlaPolicy, HfVlaSpec, openvla_prompt
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.policy_trainer import PolicyTrainer, PolicyTrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.simulator import Trajectory

IMAGE_ID, PATCHES, VOCABULARY = 5, 4, 96
SPEC = HfVlaSpec(
    prompt_ids=(1, *[IMAGE_ID] * PATCHES, 7, 8, 9),
    q01=(-2.0, 0.0, 0.0),
    q99=(2.0, 10.0, 1.0),
    scaled=(True, True, False),
    vocabulary=90,
    image_size=16,
    bins=17,
)


@pytest.fixture(scope="module")
def policy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import (
            CLIPVisionConfig,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
        )

        small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        vision = CLIPVisionConfig(**small, num_hidden_layers=2, image_size=16, patch_size=8)
        text = LlamaConfig(
            **small, num_hidden_layers=2, num_key_value_heads=2, vocab_size=VOCABULARY
        )
        config = LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=IMAGE_ID,
            vision_feature_layer=-1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlavaForConditionalGeneration(config).eval()
            for parameter in model.parameters():
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return HfVlaPolicy(model, SPEC, 16)


def images(count, seed=0):
    pictures = np.random.default_rng(seed).integers(0, 255, (count, 20, 24, 3))
    return {"image": pictures.astype(np.uint8)}


def test_what_is_drawn_token_by_token_is_what_one_forward_evaluates(policy):
    seen = images(5)
    noise = np.random.default_rng(1).random((5, 3), np.float32)
    decision = policy.actor().act(seen, noise)
    assert decision.choices.shape == (5, 1, 3)
    assert decision.choices.min() >= 0 and decision.choices.max() < 17
    with torch.no_grad():
        found = policy.evaluate(
            {"image": torch.from_numpy(seen["image"])}, torch.from_numpy(decision.choices)
        )
        values = policy.values({"image": torch.from_numpy(seen["image"])})
    assert np.allclose(found.logprobs, decision.logprobs, atol=1e-4)
    assert torch.allclose(found.values, values, atol=1e-5)
    other = policy.actor().act(images(5, seed=3), None)
    assert not np.array_equal(policy.actor().act(seen, None).logprobs, other.logprobs)


def test_tokens_mean_centres_of_bins_in_reverse_order_at_the_robots_scale(policy):
    tokens = torch.tensor([[[16, 16, 16]], [[1, 1, 1]], [[0, 0, 0]], [[8, 8, 8]]])
    low, high, end, middle = policy.actions(tokens)[:, 0]
    assert low.tolist() == pytest.approx([-2 * 0.9375, 10 * 0.03125, -0.9375])
    assert high.tolist() == pytest.approx([2 * 0.9375, 10 * 0.96875, 0.9375])
    assert torch.equal(high, end), "there is one centre fewer than tokens"
    assert middle.tolist() == pytest.approx([0.125, 5.3125, 0.0625])


def test_a_tower_of_two_gets_its_pictures_normalised_twice(policy):
    twice = HfVlaSpec(
        **{name: getattr(SPEC, name) for name in SPEC.__slots__}
        | {"normalisations": (((0.5,) * 3, (0.5,) * 3), ((0.0,) * 3, (1.0,) * 3))}
    )
    pixels = HfVlaPolicy(policy.model, twice, 16).pixels(torch.full((1, 16, 16, 3), 255))
    assert pixels.shape == (1, 6, 16, 16)
    assert pixels[0, :, 0, 0].tolist() == [1] * 6


def test_a_trainer_trains_it(policy):
    config = PolicyTrainerConfig(optimiser=OptimiserConfig(lr=1e-3), epochs=1, minibatch=4)
    trainer = PolicyTrainer(policy, config)
    noise = np.random.default_rng(1).random((8, 3), np.float32)
    shown = images(10)["image"].reshape(5, 2, 20, 24, 3)
    decision = policy.actor().act({"image": shown[:4].reshape(8, 20, 24, 3)}, noise)
    blank = np.zeros((4, 2), bool)
    one = Trajectory(
        uid="0.0",
        environments=np.arange(2, dtype=np.int32),
        observations={"image": shown},
        choices=decision.choices.reshape(4, 2, 1, 3),
        logprobs=decision.logprobs.reshape(4, 2),
        rewards=np.random.default_rng(2).standard_normal((4, 2)).astype(np.float32),
        terminated=blank,
        truncated=blank,
        valid=~blank,
        steps=np.ones((4, 2), np.int32),
        finals={"image": np.zeros((0, 20, 24, 3), np.uint8)},
        ends=np.zeros((0, 2), np.int32),
        episodes=(),
        seeds=np.arange(2),
        version=0,
    )
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    trainer.accumulate([one])
    stats = trainer.finish_step()
    assert stats.updates == 2
    assert stats.kl < 0.1
    moved = [n for n, tensor in trainer.state().items() if not torch.equal(tensor, before[n])]
    assert any("vision" in name for name in moved)
    assert any("language" in name for name in moved)
    assert "value_head.weight" in moved


def test_the_prompt_and_a_spec_that_does_not_fit():
    prompt = openvla_prompt("Pick up the Soup")
    assert prompt == "In: What action should the robot take to pick up the soup?\nOut:"
    with pytest.raises(ConfigError, match="for each number of an action"):
        HfVlaSpec((1,), (0.0,), (1.0, 2.0), (True,), 90, 16)

"""The embedded engines on an accelerator, against themselves on the CPU."""

import numpy as np
import pytest
import torch

from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SPEC = ModelSpec(vocab_size=23)


def asked():
    rng = np.random.default_rng(0)
    sampling = Sampling(stop_ids=(2,), banned_ids=(0, 1))
    return [
        GenerationRequest(f"{i}", rng.integers(3, 23, 3 + i), 4, 12, sampling) for i in range(6)
    ]


def learnt_from(groups):
    rng = np.random.default_rng(1)
    return [
        ScoredGroup.of(group, [Score(reward) for reward in rng.random(group.n)]) for group in groups
    ]


def test_rollouts_are_those_of_the_cpu():
    here = {g.uid: g for g in TorchGenerate(build_model(SPEC)).generate(asked())}
    there = {g.uid: g for g in TorchGenerate(build_model(SPEC, device="cuda")).generate(asked())}
    for uid, group in here.items():
        assert np.array_equal(group.tokens, there[uid].tokens)
        assert np.allclose(group.logprobs, there[uid].logprobs, atol=1e-3)


def test_a_step_is_that_of_the_cpu_and_survives_offloading():
    groups = learnt_from(TorchGenerate(build_model(SPEC)).generate(asked()))
    config = TrainerConfig(min_batch_tokens=0)
    norms = []
    for device in ("cpu", "cuda"):
        trainer = TorchTrainer(build_model(SPEC, device=device), config)
        for _ in range(2):
            trainer.accumulate(groups)
            trainer.offload()
            assert device == "cpu" or trainer.resident_bytes() == 0
            trainer.onload()
            stats = trainer.finish_step()
        norms.append(stats.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)

"""Every trainer engine learns the same from the same; trainers and rollouts compute the same."""

import dataclasses

import numpy as np
import pytest

from rlinf.workers.engines import fsdp, megatron
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.plugins import TRAINERS, engine_maker
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.engines.trainer_config import Parallel
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup
from rlinf.workers.team import Team
from tests.workers.ranks import Ranks
from tests.workers.test_fsdp import ALONE, VOCABULARY, scored_groups, train

STEPS = 20
CONFIG = TrainerConfig(OptimiserConfig(lr=1e-3))


def model():
    return build_model(ModelSpec(vocab_size=VOCABULARY))


def curve(team, engine):
    """The loss and the gradient's norm of each of the steps, in float32, from seeds alone."""
    config, make = CONFIG, fsdp.make
    if engine is not None:
        config = dataclasses.replace(CONFIG, parallel=engine)
        make = megatron.make
    trainer = TorchTrainer(model(), config) if team is None else make(model(), config, team)
    steps = [scored_groups(seed=seed) for seed in range(STEPS)]
    own = slice(None) if team is None else slice(team.rank, None, team.size)
    metrics, _ = train(trainer, steps, lambda groups: groups[own], team or ALONE)
    return [(step["loss"], step["grad_norm"]) for step in metrics]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_steps_have_the_same_losses_with_every_engine():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    expected = np.array(curve(None, None))
    assert np.ptp(expected[:, 0]) > 1e-2, "the curve is not flat"
    with Ranks(2) as ranks:
        for engine in (None, Parallel(tensor=2), Parallel(pipeline=2)):
            found = np.array(ranks.run(curve, engine)[0])
            assert np.abs(found - expected).max() < 1e-4, (engine, found - expected)


@pytest.mark.parametrize("kind", ["torch", "fsdp", "megatron"])
def test_rollout_and_trainer_agree_on_the_logprobs_of_the_same_tokens(kind):
    """In float32, at a temperature, with tokens that must not be drawn: the ratio is 1 to 1e-5."""
    if kind == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    sampling = Sampling(temperature=0.7, banned_ids=(0, 1), stop_ids=(2,), logprobs="full")
    requests = [
        GenerationRequest(f"r{i}", np.arange(3, 5 + 3 * i, dtype=np.int32), 4, 24, sampling)
        for i in range(5)
    ]
    team = Team()
    trainer = engine_maker("trainer", kind, TRAINERS)(model(), CONFIG, team)
    for group in TorchGenerate(model()).generate(requests):
        trainer.accumulate([ScoredGroup.of(group, [Score(float(i)) for i in range(group.n)])])
    trainer.end_round()
    parts = trainer.finish_step().parts
    assert parts.trained_tokens > 200
    assert 0 < parts.ratio_deviation < 1e-5
    team.close()


def test_nothing_but_real_tokens_goes_through_the_layers():
    """Sequences are packed: no padding between rows of different lengths, each prompt once."""
    seen = []

    def count(_, inputs):
        seen.append(len(inputs[0]))

    packed = model()
    packed.model.layers[0].mlp.down_proj.register_forward_pre_hook(count)
    trainer = TorchTrainer(packed, CONFIG)
    groups = [group for group in scored_groups(seed=1) if group.informative]
    trainer.accumulate(groups)
    trainer.finish_step()
    kept = [(g, g.scored & (g.group.lengths > 0)) for g in groups]
    real = sum(len(g.group.prompt_ids) + int((g.group.lengths[k] - 1).sum()) for g, k in kept)
    padded = sum(k.sum() * (len(g.group.prompt_ids) + g.group.tokens.shape[1]) for g, k in kept)
    assert sum(seen) == real < 0.6 * padded

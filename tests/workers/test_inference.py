"""Log-probs of another policy: the reference of a KL penalty, the old policy of the ratio."""

import dataclasses

import numpy as np
import pytest
import torch

from rlinf.workers import Cluster, wait_all
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.parameters import WeightsMismatch
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_inference import TorchInference
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.hosts import InferenceWorker, TrainerWorker
from rlinf.workers.roles import GenerationRequest, InferenceEngine, Sampling, Score, ScoredGroup

torch.set_num_threads(1)

VOCABULARY = 21


def model(seed=0):
    return build_model(ModelSpec(vocab_size=VOCABULARY, hidden_size=32, seed=seed))


def sampled():
    """Groups of two kinds of sampling, with lengths of many kinds."""
    rng = np.random.default_rng(0)
    kinds = (Sampling(stop_ids=(2,)), Sampling(stop_ids=(2, 3), temperature=0.7, banned_ids=(0,)))
    requests = [
        GenerationRequest(
            str(i), rng.integers(3, VOCABULARY, 3 + i).astype(np.int32), 4, 6 + i, kinds[i // 2]
        )
        for i in range(4)
    ]
    return [
        ScoredGroup.of(group, [Score(float(i % 2)) for i in range(group.n)])
        for group in TorchGenerate(model()).generate(requests)
    ]


def test_it_agrees_with_the_rollout_whose_weights_it_has():
    groups = sampled()
    engine = TorchInference(model())
    assert isinstance(engine, InferenceEngine)
    for before, after in zip(groups, engine.compare(groups), strict=True):
        inner = before.group
        written = np.arange(inner.tokens.shape[1]) < inner.lengths[:, None]
        assert after.reference_logprobs.shape == inner.logprobs.shape
        assert np.abs((after.reference_logprobs - inner.logprobs)[written]).max() < 1e-5
        assert not after.reference_logprobs[~written].any()
        assert after.group is inner and after.rewards is before.rewards


@pytest.mark.parametrize("bound", [{"micro_batch_tokens": 1}, {"micro_batch_logits": 1}])
def test_cuts_change_nothing(bound):
    groups = sampled()
    whole = TorchInference(model(1)).compare(groups)
    engine = TorchInference(model(1), TrainerConfig(**bound))
    apart = [engine.compare([group])[0] for group in groups]
    for one, other in zip(whole, apart, strict=True):
        assert np.allclose(one.reference_logprobs, other.reference_logprobs, atol=1e-6)


def test_a_penalty_pulls_back_only_what_has_moved_away():
    groups = sampled()
    config = TrainerConfig(kl_coefficient=10.0, kl_kind="k2")
    alone = TorchTrainer(model(), TrainerConfig())
    alone.accumulate(groups)
    plain = alone.finish_step()
    for seed, pulled in ((0, False), (1, True)):
        trainer = TorchTrainer(model(), config)
        trainer.accumulate(TorchInference(model(seed)).compare(groups))
        norm = trainer.finish_step().grad_norm
        assert (abs(norm - plain.grad_norm) > 1e-2) is pulled


def test_it_goes_on_as_it_was_saved_and_leaves_the_device_unchanged():
    groups = sampled()
    engine, other = TorchInference(model(1)), TorchInference(model())
    expected = engine.compare(groups)
    tensors, numbers = engine.save()
    other.restore(tensors, numbers)
    other.offload()
    other.onload()
    assert other.resident_bytes() == engine.resident_bytes() > 0
    for one, again in zip(expected, other.compare(groups), strict=True):
        assert np.array_equal(one.reference_logprobs, again.reference_logprobs)
    with pytest.raises(WeightsMismatch):
        other.restore({}, numbers)


@pytest.mark.parametrize("cap", [None, 1.1])
def test_an_old_policy_that_was_read_elsewhere_is_the_one_that_the_trainer_reads(cap):
    groups = sampled()
    steps = {}
    for kind in ("trainer", "inference"):
        trainer = TorchTrainer(model(1), TrainerConfig(old_logprobs=kind, importance_cap=cap))
        engine = TorchInference(model(1), fills="old_logprobs")
        trainer.accumulate(engine.compare(groups))
        steps[kind] = trainer.finish_step()
    own, given = steps["trainer"], steps["inference"]
    assert own.parts.truncated == given.parts.truncated
    assert (own.parts.truncated > 0) is (cap is not None)
    assert given.parts.ratio_deviation < 1e-5
    assert given.grad_norm == pytest.approx(own.grad_norm, rel=1e-5)
    assert given.metrics()["loss"] == pytest.approx(own.metrics()["loss"], abs=1e-6)


def test_an_old_policy_is_not_the_rollout():
    engine = TorchInference(model(1), fills="old_logprobs")
    for config, is_far in (("rollout", False), ("inference", True)):
        trainer = TorchTrainer(model(), TrainerConfig(old_logprobs=config))
        trainer.accumulate(engine.compare(sampled()))
        assert (trainer.finish_step().parts.ratio_deviation > 0.01) is is_far


def test_what_nobody_read_is_missed():
    trainer = TorchTrainer(model(), TrainerConfig(old_logprobs="inference", min_batch_tokens=0))
    with pytest.raises(ConfigError, match="groups came without old_logprobs"):
        trainer.accumulate([dataclasses.replace(g, old_logprobs=None) for g in sampled()])


def test_a_worker_that_reads_has_the_weights_it_was_given_last():
    spec = ModelSpec(vocab_size=VOCABULARY, hidden_size=32)
    config = TrainerConfig(old_logprobs="inference")
    with Cluster(launcher="inline") as cluster:
        trainer = TrainerWorker.group(cluster, spec, config, name="trainer").launch()
        inference = InferenceWorker.group(cluster, spec, config, "trainer/0", name="i").launch()
        deviations = []
        for step in range(2):
            [version] = trainer.publish().result(60)
            inference.load_weights(version).result(60)
            scored, inferred = cluster.channels(step, "scored", "inferred")
            scored.put_many(sampled())
            scored.close()
            calls = [inference.compare(scored, inferred), trainer.train(inferred)]
            report = wait_all(calls, timeout=60)[1][0].result
            deviations.append(report.parts.ratio_deviation)
            assert report.stepped
        assert max(deviations) < 1e-5

"""Memory does not grow with the number of weight syncs, nor with that of leaving a device."""

import gc

import numpy as np
import psutil
import pytest
import torch

from rlinf.workers import Cluster
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.plugins import TRAINERS, engine_maker
from rlinf.workers.engines.torch_generate import GenerateConfig, TorchGenerate
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.fingerprint import fingerprint
from rlinf.workers.hosts import RolloutWorker, TrainerWorker
from rlinf.workers.shards import Shard
from rlinf.workers.team import Team

MODEL = ModelSpec("tiny", vocab_size=64, hidden_size=256, layers=2, heads=4)
NBYTES = sum(parameter.nbytes for parameter in build_model(MODEL).parameters())
"""Of its parameters: a leak of one copy a cycle would be twenty times that."""
CYCLES = 20
PAIR = (np.array([3, 4], np.int32), np.array([5, 6], np.int32))


class Moving(TrainerWorker):
    """A trainer whose weights change without samples."""

    def nudge(self):
        self._engine.sft_step([PAIR], OptimiserConfig())
        self._engine._version += 1


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def grown(cycle):
    """Bytes that the process has more after `CYCLES` cycles than after the first few."""
    for _ in range(4):
        cycle()
    before = resident()
    for _ in range(CYCLES):
        cycle()
    return resident() - before


@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_weight_syncs(engine):
    with Cluster(launcher="inline") as cluster:
        config = TrainerConfig(engine=engine)
        trainer = Moving.group(cluster, MODEL, config, name="trainer").launch()
        rollout = RolloutWorker.group(cluster, MODEL, GenerateConfig(), "trainer/0").launch()
        marks = set()

        def sync():
            trainer.nudge().result(60)
            [version] = trainer.publish().result(60)
            marks.update(rollout.load_weights(version).result(60))

        assert grown(sync) < 2 * NBYTES
        assert len(marks) == CYCLES + 4, "other weights each time"


def mark(engine):
    """Of the weights that lie in this process, whole or cut."""
    state = engine.state().items()
    return fingerprint({name: t.values if isinstance(t, Shard) else t for name, t in state})


def cycles(engine):
    """Away and back, with the same bytes after as before."""
    before = mark(engine)

    def cycle():
        engine.offload()
        engine.onload()

    grew = grown(cycle)
    assert mark(engine) == before
    return grew


@pytest.mark.parametrize("kind", ["torch", "fsdp", "rollout"])
def test_leaving_the_device(kind):
    """On the CPU nothing moves, but nothing must pile up either; see the other one for a GPU."""
    team = Team()
    model = build_model(MODEL)
    if kind == "rollout":
        engine = TorchGenerate(model)
    else:
        engine = engine_maker("trainer", kind, TRAINERS)(model, TrainerConfig(), team)
        engine.sft_step([PAIR], OptimiserConfig())
    assert cycles(engine) < NBYTES
    assert engine.resident_bytes() >= NBYTES
    team.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["torch", "fsdp", "rollout"])
def test_leaving_a_gpu(kind):
    team = Team()
    model = build_model(MODEL, device="cuda")
    if kind == "rollout":
        engine = TorchGenerate(model)
    else:
        engine = engine_maker("trainer", kind, TRAINERS)(model, TrainerConfig(), team)
        engine.sft_step([PAIR], OptimiserConfig())
    before = torch.cuda.memory_allocated()
    assert cycles(engine) < 3 * NBYTES
    assert torch.cuda.memory_allocated() <= before
    engine.offload()
    assert engine.resident_bytes() == 0
    assert torch.cuda.memory_allocated() < before - NBYTES
    engine.onload()
    team.close()

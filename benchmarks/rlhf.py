"""One GRPO step, end to end: this system on Ray against TRL, and against a plain loop.

The same Qwen2 with random weights, prompts, groups and lengths, one optimiser step, float32, all
cores. TRL runs in a process of its own, with its own Python:

    python -m venv benchmarks/trl-venv
    benchmarks/trl-venv/bin/pip install torch==2.13.0 trl==1.16.0
    hatch run bench rlhf --trl benchmarks/trl-venv/bin/python
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import race, show
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlinf.workers import Cluster, FlowPlanner, wait_all
from rlinf.workers.engines.models import ModelSpec
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.torch_generate import GenerateConfig, TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.hosts import RewardWorker, RolloutWorker, TrainerWorker
from rlinf.workers.roles import GenerationRequest, Group, Sampling, Score, ScoredGroup

HERE = Path(__file__).parent
PYTHON = HERE / "trl-venv" / "bin" / "python"
VOCABULARY = 19
PROMPT = 7
END = 2
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
}

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Setting:
    """A size of the step. With `fixed` no response ends by itself."""

    prompts: int
    samples: int
    tokens: int
    fixed: bool

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn."""
        return Sampling(banned_ids=(END,)) if self.fixed else Sampling(stop_ids=(END,))


SETTINGS = {
    "natural ends, 16 x 16 x 8": Setting(16, 16, 8, fixed=False),
    "fixed length, 32 x 16 x 16": Setting(32, 16, 16, fixed=True),
}


class Contains:
    """A `RewardEngine`: 1 where the prompt's last token occurs in the response."""

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """See `RewardEngine`."""
        return [
            ScoredGroup.of(
                group, [Score(float(group.prompt_ids[-1] in group.own(i))) for i in range(group.n)]
            )
            for group in groups
        ]


def prompts(setting: Setting) -> list[list[int]]:
    """Enough of them for 16 steps without a repeat."""
    rng = random.Random(0)
    count = 16 * setting.prompts
    return [[1, *(rng.randrange(3, VOCABULARY) for _ in range(PROMPT - 1))] for _ in range(count)]


def requests(setting: Setting, step: int) -> list[GenerationRequest]:
    """What is sampled in a step."""
    asked, size = prompts(setting), setting.prompts
    start = step * size % len(asked)
    return [
        GenerationRequest(
            f"{step}.{i}",
            np.array(ids, np.int32),
            setting.samples,
            setting.tokens,
            setting.sampling,
        )
        for i, ids in enumerate(asked[start : start + size])
    ]


def trainer_config(setting: Setting) -> TrainerConfig:
    """GRPO as TRL does it by default, without KL."""
    optimiser = OptimiserConfig(lr=1e-4, warmup_steps=0)
    return TrainerConfig(optimiser, max_response_tokens=setting.tokens)


def plain(setting: Setting, folder: Path) -> Step:
    """The same engines, called one after the other on one copy of the weights."""
    trainer = TorchTrainer(_model(folder), trainer_config(setting))
    rollout, reward = TorchGenerate(trainer.model), Contains()
    steps = iter(range(1 << 30))

    def step() -> object:
        groups = list(rollout.generate(requests(setting, next(steps))))
        trainer.accumulate(reward.score(groups))
        return trainer.finish_step()

    return step


def framework(setting: Setting, folder: Path, cluster: Cluster) -> Step:
    """The workers, their channels and weights in versions."""
    model = ModelSpec("folder", path=folder)
    trainer = TrainerWorker.group(cluster, model, trainer_config(setting), name="trainer").launch()
    rollout = RolloutWorker.group(
        cluster, model, GenerateConfig(), "trainer/0", name="rollout"
    ).launch()
    reward = RewardWorker.group(cluster, Contains, name="reward").launch()

    def run() -> Iterator[object]:
        for step in FlowPlanner(cluster, "temporal").steps(iter(range(1, 1 << 30))):
            [version, *_] = trainer.publish().result(None)
            rollout.load_weights(version).result(None)
            asked, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
            asked.put_many(requests(setting, step))
            asked.close()
            yield wait_all(
                [
                    rollout.generate(asked, samples),
                    reward.score(samples, scored),
                    trainer.train(scored),
                ]
            )

    steps = run()
    return lambda: next(steps)


class Trl:
    """TRL's process. `step` does one of its steps; `close` gives its peak memory in bytes."""

    def __init__(self, python: Path, setting: Setting) -> None:
        if not python.exists():
            raise SystemExit(f"there is no TRL at {python}: see the first lines of {__file__}")
        rows = setting.prompts * setting.samples
        settings: dict[str, Any] = {
            "threads": len(os.sched_getaffinity(0)),
            "model": MODEL,
            "prompts": setting.prompts,
            "samples": setting.samples,
            "tokens": setting.tokens,
            "fixed": setting.fixed,
            "micro_batch": min(rows, 128),
            "asked": prompts(setting),
        }
        self._process = subprocess.Popen(
            [python, HERE / "trl_steps.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._say(json.dumps(settings))

    def step(self) -> float:
        """Its own count of the seconds."""
        self._say("go")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("TRL ended: run benchmarks/trl_steps.py by itself to see why")
        return float(line)

    def close(self) -> int:
        """End it."""
        rest, _ = self._process.communicate(timeout=60)
        return int(rest.split()[-1])

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def _model(folder: Path) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**MODEL)).eval()
    disable_progress_bar()
    model.save_pretrained(folder)
    return model


def measure(quick: bool) -> dict[str, object]:
    """Seconds a step for both settings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", type=Path, default=PYTHON)
    trl_python = parser.parse_known_args(sys.argv[2:])[0].trl
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tables: dict[str, object] = {}
    for title, setting in SETTINGS.items():
        folder = Path(tempfile.mkdtemp())
        trl = Trl(trl_python, setting)
        with Cluster(launcher="ray") as cluster:
            contestants = {
                "one loop": plain(setting, folder),
                "rlinf, on Ray": framework(setting, folder, cluster),
                "TRL": trl.step,
            }
            samples = race(
                contestants, 5 if quick else 30, warmup=3, patience_s=20 if quick else 90
            )
        tables[title] = show(f"one GRPO step, {title}", samples, "rlinf, on Ray")
        tables[f"{title}, peak memory of TRL"] = trl.close()
    return tables

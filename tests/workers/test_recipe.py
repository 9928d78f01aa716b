"""Reinforcement learning from end to end, in one process: does the reward rise?"""

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.workers.algorithms.losses import Clip
from rlinf.workers.engines.models import ModelSpec, build_model, load_tokenizer
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.torch_generate import TorchGenerate
from rlinf.workers.engines.torch_trainer import TorchTrainer, TrainerConfig
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles import GenerationRequest, Sampling, Score, ScoredGroup

CLIP = Clip(0.2, 0.28)
TASKS = Path(__file__).parents[2] / "apps" / "rlhf" / "tasks.py"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads on busy cores wait for each other most of the time
    yield
    torch.set_num_threads(before)


def mean(values):
    return sum(values) / len(values)


def repeated(response, digit):
    """Share of the places at which the response says `digit`, of the longer of the two."""
    right = sum(int(token == digit) for token in response[:4])
    return right / max(len(response), 4)


def scored_repetition(group):
    digit = int(group.prompt_ids[1])
    scores = [Score(repeated(group.response(i).tolist(), digit)) for i in range(group.n)]
    return ScoredGroup.of(group, scores)


def learn_to_repeat(seed, lr, steps=80):
    """From scratch: after a digit, say it four times. Mean reward of each step."""
    model = build_model(ModelSpec(vocab_size=20, layers=1, seed=seed))
    rollout = TorchGenerate(model)
    trainer = TorchTrainer(model, TrainerConfig(OptimiserConfig(lr=lr), clip=CLIP))
    sampling = Sampling(stop_ids=(2,), banned_ids=(0, 1), seed=seed)
    rng = random.Random(seed)
    rewards = []
    for step in range(steps):
        asked = [
            GenerationRequest(
                f"{step}.{i}", np.array([1, rng.randrange(3, 13), 16], np.int32), 16, 4, sampling
            )
            for i in range(16)
        ]
        trainer.accumulate([scored_repetition(group) for group in rollout.generate(asked)])
        rewards.append(trainer.finish_step().metrics()["reward"])
    return rewards


def test_repeating_is_learnt_from_scratch():
    rewards = learn_to_repeat(0, lr=3e-3)
    assert mean(rewards[:5]) < 0.15
    assert mean(rewards[-5:]) > 0.90


def test_nothing_is_learnt_without_a_learning_rate():
    rewards = learn_to_repeat(0, lr=0.0, steps=15)
    assert mean(rewards[-5:]) < 0.15


def rlhf_tasks():
    spec = importlib.util.spec_from_file_location("rlhf_tasks_under_test", TASKS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def accuracy(rollout, task, items, sampling, limits):
    """Mean reward of (samples, new tokens) = `limits` on held-out items."""
    samples, tokens = limits
    asked = task.requests("held out", items, sampling, samples, tokens)
    scored = task.reward().score(list(rollout.generate(asked)))
    return mean([float(group.rewards.mean()) for group in scored])


def reinforced(task, rollout, trainer, shape, sampling):
    """Mean reward of each step; shape is (steps, prompts, samples, new tokens)."""
    steps, prompts, samples, tokens = shape
    reward = task.reward()
    rewards = []
    for step in range(steps):
        items = task.prompts(1000 * sampling.seed + step, prompts)
        asked = task.requests(f"{sampling.seed}.{step}", items, sampling, samples, tokens)
        for group in rollout.generate(asked):
            trainer.accumulate(reward.score([group]))
        rewards.append(trainer.finish_step().metrics()["reward"])
        rollout.load_state(trainer.state(trainable_only=True), trainer.version)
    return rewards


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sorting_is_learnt_after_supervised_steps():
    tasks = rlhf_tasks()
    task = tasks.Task(tasks.TaskConfig(), tasks.CharTokenizer())
    model = build_model(ModelSpec(vocab_size=tasks.CharTokenizer.size))
    rollout = TorchGenerate(model)
    trainer = TorchTrainer(model, TrainerConfig(clip=CLIP))
    sampling = Sampling(stop_ids=(2,), banned_ids=(0, 1))
    supervised = OptimiserConfig(lr=1e-3, warmup_steps=20, beta2=0.98, weight_decay=0.01)
    for count, pairs in enumerate(task.demonstrations(0, 256), start=1):
        trainer.sft_step(pairs, supervised)
        if count % 10 == 0 and accuracy(rollout, task, task.held_out, sampling, (4, 5)) >= 0.3:
            break
        assert count < 400
    rewards = reinforced(task, rollout, trainer, (60, 32, 16, 5), sampling)
    held_out = accuracy(rollout, task, task.held_out, sampling, (4, 5))
    print(f"SFT {count} steps, R {mean(rewards[:5]):.3f} -> {mean(rewards[-5:]):.3f}", held_out)
    assert mean(rewards[:5]) < 0.50
    assert mean(rewards[-5:]) > 0.70
    assert mean(rewards[-5:]) - mean(rewards[:5]) > 0.25
    assert held_out > 0.70


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_learns_to_add():
    tasks = rlhf_tasks()
    try:
        tokenizer = load_tokenizer(ModelSpec("smollm2"))
    except ConfigError as error:
        pytest.skip(str(error))
    words = tasks.PretrainedTokenizer(tokenizer)
    task = tasks.Task(tasks.TaskConfig(name="chain_sum", size=3000, held_out=40), words)
    trainer = TorchTrainer(
        build_model(ModelSpec("smollm2")),
        TrainerConfig(
            OptimiserConfig(lr=3e-5, warmup_steps=3),
            clip=CLIP,
            old_logprobs="trainer",
            trainable_layers=10,
            autocast=True,
        ),
    )
    rollout = TorchGenerate(build_model(ModelSpec("smollm2", dtype="auto"), weights=False))
    rollout.load_state(trainer.state(), 0)
    sampling = Sampling(stop_ids=words.stop_ids)
    before = accuracy(rollout, task, task.held_out, sampling, (4, 4))
    rewards = reinforced(task, rollout, trainer, (30, 16, 8, 4), sampling)
    after = accuracy(rollout, task, task.held_out, sampling, (4, 4))
    print(f"R {mean(rewards[:5]):.3f} -> {mean(rewards[-5:]):.3f}, held-out {before} -> {after}")
    assert mean(rewards[:5]) < 0.45
    assert mean(rewards[-5:]) > 0.52

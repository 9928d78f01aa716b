"""An agent that multiplies with a Python tool: another tool, the same episodes.

    python docs/tools/python_agent.py

A model of 100 k parameters learns from 12,800 demonstrations to write a program in place of a
product that it cannot compute.
"""

import random

import numpy as np
import torch

from rlinf.workers.engines.episode_reward import EpisodeReward
from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.optimiser import OptimiserConfig
from rlinf.workers.engines.torch_episodes import EpisodeConfig, TorchEpisodes
from rlinf.workers.engines.torch_trainer import TorchTrainer
from rlinf.workers.episodes.codec import TextCodec
from rlinf.workers.episodes.episode import EpisodeLimits, Language
from rlinf.workers.episodes.turn_format import TurnFormat
from rlinf.workers.roles import EpisodeStats, GenerationRequest, Sampling
from rlinf.workers.tools.box import ToolBox
from rlinf.workers.tools.python_tool import PythonTool

STEPS, BATCH = 200, 64
turns = TurnFormat(["python"])
codec = TextCodec.trained([], 258 + len(turns.tags), ["<pad>", "<end>", *turns.tags])


def product(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return f"{a}*{b}", str(a * b)


def demonstration(rng: random.Random) -> list[tuple[str, bool]]:
    """What is said, and whether the model says it."""
    asked, answer = product(rng)
    return [
        (f"{asked}=", False),
        (f"<python>{asked}</python>", True),
        (f"<information>{answer}</information>", False),
        (f"<answer>{answer}</answer>", True),
    ]


def learn(trainer: TorchTrainer) -> None:
    """Imitate demonstrations."""
    rng = random.Random(0)
    for _ in range(STEPS):
        pairs, written = [], []
        for parts in (demonstration(rng) for _ in range(BATCH)):
            ids = [(codec.encode(text), ours) for text, ours in parts]
            response = [i for part, _ in ids[1:] for i in part]
            pairs.append((np.array(ids[0][0], np.int32), np.array(response, np.int32)))
            written.append(np.array([ours for part, ours in ids[1:] for _ in part]))
        trainer.sft_step(pairs, OptimiserConfig(lr=5e-3, warmup_steps=20), written)


def main() -> None:
    """Learn, then answer questions that were not in the demonstrations, but by chance."""
    torch.set_num_threads(1)
    spec = ModelSpec(vocab_size=codec.size, hidden_size=64, layers=2)
    trainer = TorchTrainer(build_model(spec))
    learn(trainer)
    rng = random.Random(1)
    asked = [product(rng) for _ in range(64)]
    sampling = Sampling(temperature=0.0, stop_ids=(1,), banned_ids=(0,))
    requests = [
        GenerationRequest(str(i), np.array(codec.encode(f"{q}="), np.int32), 1, 32, sampling, i)
        for i, (q, _) in enumerate(asked)
    ]
    language, config = Language(codec, turns), EpisodeConfig(EpisodeLimits(calls=2))
    with ToolBox({"python": PythonTool()}) as box:
        groups = list(TorchEpisodes(trainer.model, config, language, box).generate(requests))
    first = next(group for group in groups if group.item == 0)
    print(codec.decode([*first.prompt_ids, *first.response(0)]))
    scored = EpisodeReward(language, {i: [a] for i, (_, a) in enumerate(asked)}).score(groups)
    stats = sum((EpisodeStats.of(group.episodes) for group in groups), EpisodeStats())
    print(f"right: {np.mean([g.rewards.mean() for g in scored]):.2f}", end=", ")
    print(f"programs run: {stats.calls}, failed: {stats.failed}")


if __name__ == "__main__":
    main()

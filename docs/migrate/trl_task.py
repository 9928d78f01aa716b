"""What both TRL programs train: a small random Llama that is to say "yes"."""

import argparse
import json
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

WORDS = ["<pad>", "<eos>", "<unk>", "say", "it", "now", "please", "yes", "no"]
WORDS += [f"word{number}" for number in range(23)]
GENERATIONS = 8
NEW_TOKENS = 16


def tokenizer() -> PreTrainedTokenizerFast:
    """Words, and nothing to download."""
    base = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(hidden: int) -> LlamaForCausalLM:
    """The same weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of "yes"."""
    return [text.split().count("yes") / max(1, len(text.split())) for text in completions]


def prompts() -> Dataset:
    """A few of them."""
    texts = ["say it now", "say it please", "please say it", "now say it"]
    return Dataset.from_list([{"prompt": text} for text in texts * 16])


def settings(steps: int, folder: str) -> GRPOConfig:
    """CPU, no reports, no files."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=steps,
        per_device_train_batch_size=GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        learning_rate=3e-3,
        beta=0.0,
        temperature=1.0,
        seed=1,
    )


class Stopwatch(TrainerCallback):
    """Seconds a step, without the first one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note when."""
        self.times.append(time.monotonic())

    def seconds(self) -> float:
        """On average."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


def arguments() -> argparse.Namespace:
    """The command line of both programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=64)
    return parser.parse_args()


def report(trainer: Any, watch: Stopwatch) -> None:
    """One line of JSON."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"seconds": watch.seconds(), "rewards": rewards}))

"""TRL's half of the benchmark `rlhf`; run by another Python, one that has trl 1.16.0.

Reads its settings as JSON from the first line of standard input. Each further line says how many
optimiser steps to do; then their seconds are printed.
"""

import contextlib
import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 where the sum of the response's tokens is even."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


class Paced(TrainerCallback):
    """Begins steps when it is told to, and says how long they took."""

    begun, left = 0.0, 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the next line, unless there are more steps to do."""
        if self.left:
            return
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.left = json.loads(line)
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Say how long it was since, when all are done."""
        self.left -= 1
        if not self.left:
            print(time.perf_counter() - self.begun, flush=True)


def main() -> None:
    """See the module."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["folder"], padding_side="left")
    prompts, samples = settings["prompts"], settings["samples"]
    rows = prompts * samples
    fixed = settings["fixed"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=min(rows, settings["micro_batch"]),
        gradient_accumulation_steps=max(1, rows // settings["micro_batch"]),
        num_generations=samples,
        max_completion_length=settings["tokens"],
        generation_kwargs={"min_new_tokens": settings["tokens"]} if fixed else None,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=settings["lr"],
        max_steps=100_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": settings["asked"]}),
        processing_class=tokenizer,
        callbacks=[Paced()],
    )
    with contextlib.suppress(SystemExit):
        trainer.train()


if __name__ == "__main__":
    main()

"""TRL's half of the benchmark `rlhf`; run by another Python, one that has trl 1.16.0.

Reads its settings as JSON from the first line of standard input, then does one optimiser step for
each further line, and prints its seconds, and at the end its peak memory in bytes.
"""

import json
import resource
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """Token i is written " ti"; 0 pads, 1 begins, 2 ends."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", padding_side="left"
    )


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 where the prompt's last token occurs in the response."""
    wanted = [int(prompt.rsplit("t", 1)[1]) for prompt in prompts]
    return [float(token in ids) for token, ids in zip(wanted, completion_ids, strict=True)]


class Paced(TrainerCallback):
    """Begins a step when it is told to, and says how long it took."""

    begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the next line."""
        if not sys.stdin.readline():
            raise SystemExit
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Say how long it was since."""
        print(time.perf_counter() - self.begun, flush=True)


def main() -> None:
    """See the module."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**settings["model"]))
    prompts, samples = settings["prompts"], settings["samples"]
    rows = prompts * samples
    texts = [" ".join(f"t{i}" for i in ids) for ids in settings["asked"]]
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
        learning_rate=1e-4,
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
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer_of(settings["model"]["vocab_size"]),
        callbacks=[Paced()],
    )
    try:
        trainer.train()
    except SystemExit:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)


if __name__ == "__main__":
    main()

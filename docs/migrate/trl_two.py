"""The same with generation in a process of its own: TRL's `rollout_func` is a send and a recv."""

import multiprocessing
import tempfile
from typing import Any

import torch
import trl_task
from trl import GRPOTrainer

from rlinf.comm import Endpoint, RegistryClient, RegistryServer


def generate(address: str, token: bytes, hidden: int) -> None:
    """The generator: new weights and prompts in, completions and their log-probabilities out."""
    words, model = trl_task.tokenizer(), trl_task.model(hidden)
    torch.manual_seed(1)
    with Endpoint("generator/0", registry=RegistryClient(address, token)) as me:
        while (order := me.recv("trainer/0", timeout=120.0)) is not None:
            model.load_state_dict(order["weights"])
            inputs = words(order["prompts"], return_tensors="pt", padding=True)
            with torch.no_grad():
                made = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=trl_task.NEW_TOKENS,
                    do_sample=True,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            ids = made.sequences[:, inputs["input_ids"].shape[1] :]
            logits = torch.stack(made.logits, dim=1).log_softmax(-1)
            logprobs = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            lengths = [int((row != words.pad_token_id).sum()) for row in ids]
            me.send(
                {
                    "prompt_ids": words(order["prompts"])["input_ids"],
                    "completion_ids": [r[:n].tolist() for r, n in zip(ids, lengths, strict=True)],
                    "logprobs": [r[:n].tolist() for r, n in zip(logprobs, lengths, strict=True)],
                },
                to="trainer/0",
            )


def remote(me: Endpoint) -> Any:
    """TRL's rollout function, answered by the generator."""

    def roll_out(prompts: list[str], trainer: Any) -> Any:
        weights = {name: value.detach() for name, value in trainer.model.state_dict().items()}
        me.send({"weights": weights, "prompts": prompts}, to="generator/0", timeout=120.0)
        return me.recv("generator/0", timeout=120.0)

    return roll_out


if __name__ == "__main__":
    args = trl_task.arguments()
    watch = trl_task.Stopwatch()
    spawn = multiprocessing.get_context("spawn")
    with (
        RegistryServer() as registry,
        Endpoint("trainer/0", registry=registry) as me,
        tempfile.TemporaryDirectory() as folder,
    ):
        generator = spawn.Process(
            target=generate, args=(registry.address, registry.token, args.hidden)
        )
        generator.start()
        trainer = GRPOTrainer(
            model=trl_task.model(args.hidden),
            reward_funcs=trl_task.reward,
            args=trl_task.settings(args.steps, folder),
            train_dataset=trl_task.prompts(),
            processing_class=trl_task.tokenizer(),
            callbacks=[watch],
            rollout_func=remote(me),
        )
        trainer.train()
        trl_task.report(trainer, watch)
        me.send(None, to="generator/0")
        generator.join()

"""TRL's GRPOTrainer as it is: training and generation take turns in one process."""

import tempfile

import trl_task
from trl import GRPOTrainer

if __name__ == "__main__":
    args = trl_task.arguments()
    watch = trl_task.Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=trl_task.model(args.hidden),
            reward_funcs=trl_task.reward,
            args=trl_task.settings(args.steps, folder),
            train_dataset=trl_task.prompts(),
            processing_class=trl_task.tokenizer(),
            callbacks=[watch],
        )
        trainer.train()
        trl_task.report(trainer, watch)

"""RL of an agent that learns to search: episodes of several turns, on real Wikipedia text.

hatch run search-r1                       # a tiny model learns to search before it answers
hatch run search-r1 search=false          # the control: nothing to search with
hatch run search-r1 retriever=http://127.0.0.1:8000     # a server: python apps/search_r1/serve.py
hatch run search-r1 plan=spatial          # rollout and trainer side by side
hatch run search-r1 launcher=inline       # the same program in one process, for pdb
hatch run search-r1 model=smollm2         # a real model of 135 M parameters
"""

import itertools
import sys

from actor import Actor
from evaluation import evaluate
from settings import CHOICES, CONFIG, SearchConfig

from rlinf.workers import FlowPlanner, main_guard, wait_all
from rlinf.workers.checkpoint import Checkpoints
from rlinf.workers.hosts import RewardWorker
from rlinf.workers.program import described, run_folder
from rlinf.workers.recovery import Recovery
from rlinf.workers.run import Run
from rlinf.workers.tool_hosts import EpisodeWorker, ToolWorker


def train(config: SearchConfig) -> None:
    """The whole flow. Every call on a group is asynchronous; `wait_all` is the only barrier."""
    task = config.make_task()
    folder, origin = run_folder("search_r1", config.folder, config.resume)
    with (
        Run(folder) as run,
        config.open_cluster(folder) as cluster,
    ):
        trainer = Actor.group(
            cluster, config.model_spec(), config.trainer_config(), name="trainer"
        ).launch()
        tool = ToolWorker.group(cluster, config.make_tool, name="search").launch()
        rollout = EpisodeWorker.group(
            cluster,
            config.model_spec(config.rollout.dtype),
            config.episode_config(),
            "trainer/0",
            config.make_language,
            config.tool_access("search/0"),
            name="rollout",
        ).launch()
        reward = RewardWorker.group(cluster, config.make_reward, name="reward").launch()

        def begin() -> None:
            run.say("imitating demonstrations")
            trainer.warm_up(config).result(None)

        planner = FlowPlanner(cluster, config.plan, config.scheduling, run.planned)
        run.say("starting the workers")
        tool.wait_ready()
        checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint, origin, lambda: described(config, run.plan)
        )
        recovery = Recovery(cluster, [trainer], checkpoints, begin, run)
        for attempt in planner.steps(recovery.steps(config.steps)):
            with attempt as step:
                metrics: dict[str, float] = {}
                [version] = trainer.publish().result(None)
                rollout.load_weights(version).result(None)
                if config.eval.every and (step - 1) % config.eval.every == 0:
                    metrics |= evaluate(cluster, (rollout, reward), task, config, step)
                wanted = None
                for round in itertools.count():  # more than one where dynamic sampling wants them
                    names = "questions", "episodes", "scored"
                    questions, episodes, scored = cluster.channels(step, *names)
                    questions.put_many(config.requests(task, step, round, wanted))
                    questions.close()
                    sampled, _, [report] = wait_all(
                        [
                            rollout.generate(questions, episodes),
                            reward.score(episodes, scored),
                            trainer.train(scored),
                        ]
                    )
                    if not isinstance(report.result, int):
                        break
                    wanted = report.result
                metrics["idle_share"] = sampled[0].idle_s / max(sampled[0].seconds, 1e-9)
                run.record(step, metrics | report.result.metrics())
        run.finish()


if __name__ == "__main__":
    sys.exit(main_guard(train, SearchConfig, CONFIG, choices=CHOICES))

"""RL of policies that act in simulators: collect trajectories, learn from them, publish.

hatch run embodied                          # ManiSkill: a cart learns to balance a pole
hatch run embodied env=inverted_pendulum    # MuJoCo; or reacher, pushcube
hatch run embodied env=reacher env.parallelism=32
hatch run embodied algorithm=grpo           # whole episodes, in groups that begin alike
hatch run libero:main env=libero_object     # pictures and an instruction; imitates first
hatch run embodied plan=auto                # profiles itself and finds the best plan
hatch run embodied plan=spatial scheduling.max_staleness=1    # acting goes on while it learns
hatch run embodied launcher=inline          # the same program in one process, for pdb
"""

import sys

from acting import Acting
from recording import Films
from settings import CONFIG, EmbodiedConfig

from rlinf.workers import FlowPlanner, main_guard, wait_all
from rlinf.workers.ahead import Ahead
from rlinf.workers.checkpoint import Checkpoints
from rlinf.workers.engines.simulation.lane import find_spaces
from rlinf.workers.program import described, run_folder
from rlinf.workers.recovery import Recovery
from rlinf.workers.run import Run
from rlinf.workers.simulation_hosts import PolicyTrainerWorker


def train(config: EmbodiedConfig) -> None:
    """The whole flow. Every call on a group is asynchronous; `wait_all` is the only barrier."""
    folder, origin = run_folder("embodied", config.folder, config.resume)
    world = config.env.world
    with (
        Run(folder, counts="env_steps", title=f"Return in {world.id}") as run,
        config.open_cluster(folder) as cluster,
    ):
        run.say(f"making {world.id}")
        spaces = find_spaces(world, config.env.start_s)
        trainer = PolicyTrainerWorker.group(
            cluster, spaces, config.trainer_config(), config.make_policy, name="trainer"
        ).launch()
        run.say("starting the workers")
        acting = Acting(cluster, config, spaces)
        films = Films(cluster, config, spaces, run)
        planner = FlowPlanner(cluster, config.plan, config.scheduling, run.planned)
        checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint, origin, lambda: described(config, run.plan)
        )

        def begin() -> None:
            if config.imitation.episodes:
                run.say("imitating demonstrations")
                trainer.warm_up(world, config.imitation, config.seed).result(None)

        recovery = Recovery(cluster, [trainer], checkpoints, begin, run)
        lead = config.scheduling.max_staleness
        ahead = Ahead(acting.begin, cluster.give_up, config.steps)
        for attempt in planner.steps(recovery.steps(config.steps)):
            with attempt as step:
                [version] = trainer.publish().result(None)
                loaded = acting.load_weights(version)
                calls, trajectories = ahead.take(step, lead if run.plan else 0)
                *_, [report] = wait_all([loaded, *calls, trainer.train(trajectories)])
                run.record(step, report.result.metrics())
                films.draw(step)
            if attempt.failed:
                ahead.clear()
        films.finish()
        run.finish()


if __name__ == "__main__":
    sys.exit(main_guard(train, EmbodiedConfig, CONFIG, preset_key="env.name"))

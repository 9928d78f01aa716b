"""RL of policies that act in simulators: collect trajectories, learn from them, publish.

hatch run embodied                          # ManiSkill: a cart learns to balance a pole
hatch run embodied env=inverted_pendulum    # MuJoCo; or reacher, pushcube
hatch run embodied env=reacher env.parallelism=32
hatch run embodied algorithm=grpo           # whole episodes, in groups that begin alike
hatch run libero:main env=libero_object     # pictures and an instruction; imitates first
hatch run embodied plan=auto                # profiles itself and finds the best plan
hatch run embodied launcher=inline          # the same program in one process, for pdb
"""

import sys

from recording import Films
from settings import CONFIG, EmbodiedConfig

from rlinf.workers import Cluster, FlowPlanner, WorkerGroup, main_guard, wait_all
from rlinf.workers.checkpoint import Checkpoints
from rlinf.workers.engines.simulation.lane import find_spaces
from rlinf.workers.program import described, run_folder
from rlinf.workers.recovery import Recovery
from rlinf.workers.roles.simulator import Spaces
from rlinf.workers.run import Run
from rlinf.workers.simulation_hosts import (
    ActorWorker,
    PolicyTrainerWorker,
    SimulatorWorker,
    SteppedSimulatorWorker,
)


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
        simulator, actor = launch_simulator(cluster, config, spaces)
        films = Films(cluster, config, spaces, run)
        planner = FlowPlanner(cluster, config.plan, config.scheduling, run.planned)
        run.say("starting the workers")
        [lanes] = simulator.lanes().result(None)
        checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint, origin, lambda: described(config, run.plan)
        )

        def begin() -> None:
            if config.imitation.episodes:
                run.say("imitating demonstrations")
                trainer.warm_up(world, config.imitation, config.seed).result(None)

        recovery = Recovery(cluster, [trainer], checkpoints, begin, run)
        for attempt in planner.steps(recovery.steps(config.steps)):
            with attempt as step:
                [version] = trainer.publish().result(None)
                loaded = actor.load_weights(version)
                requests, trajectories = cluster.channels(step, "requests", "trajectories")
                requests.put_many(config.requests(step, lanes))
                requests.close()
                if actor is simulator:
                    acting = [simulator.collect(requests, trajectories)]
                else:
                    ring = cluster.ring(step, "shown", "decided")
                    acting = [simulator.step(requests, trajectories, ring), actor.act(*ring)]
                *_, [report] = wait_all([loaded, *acting, trainer.train(trajectories)])
                run.record(step, report.result.metrics())
                films.draw(step)
        films.finish()
        run.finish()


def launch_simulator(
    cluster: Cluster, config: EmbodiedConfig, spaces: Spaces
) -> tuple[WorkerGroup, WorkerGroup]:
    """Who has the environments, and who acts in them: the same group, or another one."""
    world, settings, make = config.env.world, config.simulator_config(), config.make_policy
    if config.acting == "inside":
        both = SimulatorWorker.group(
            cluster, world, settings, make, "trainer/0", spaces, name="simulator"
        ).launch()
        return both, both
    actor = ActorWorker.group(cluster, spaces, make, "trainer/0", name="policy").launch()
    [outline] = actor.outline().result(None)
    stepped = SteppedSimulatorWorker.group(
        cluster, world, settings, outline, spaces, name="simulator"
    ).launch()
    return stepped, actor


if __name__ == "__main__":
    sys.exit(main_guard(train, EmbodiedConfig, CONFIG, preset_key="env.name"))

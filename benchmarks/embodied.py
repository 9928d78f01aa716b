"""Policies that act in simulators: how fast they are trained, and how fast environments step.

Training: the app itself (a program of its own on a Ray cluster, whole iterations: acting, learning,
publishing) against stable-baselines3's PPO, the same environment, network, batch, minibatch, passes
and rates; its better one of SubprocVecEnv and DummyVecEnv counts. Both begin to count when their
environments are made. Vectors: `VectorEnvironment` against gymnasium's AsyncVectorEnv and
SyncVectorEnv on 64x64 RGB pictures, in step, with the pictures at hand in one array.

The task with ManiSkill runs where it is installed (`hatch run embodied:bench embodied`).
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / "apps" / "embodied" / "main.py"
HERE = Path(__file__).parent
TASKS = {
    "inverted_pendulum": {
        "id": "InvertedPendulum-v5",
        "envs": 16,
        "horizon": 32,
        "minibatch": 256,
        "lr": 3e-3,
        "decay": 3000,
        "std": 0.5,
        "target": 950.0,
        "steps": 80_000,
    },
    "cartpole_balance": {
        "id": "MS-CartpoleBalance-v1",
        "envs": 4,
        "horizon": 256,
        "minibatch": 128,
        "lr": 1e-3,
        "decay": 0,
        "std": 1.0,
        "target": 600.0,
        "steps": 80_000,
    },
}
EPOCHS = 10
OURS = {
    "rlinf": (),
    "rlinf ahead": ("plan=spatial", "scheduling.max_staleness=1"),
}
"""In turn, as stable-baselines3 does it; and acting beside learning, an iteration ahead of it."""
WINDOW = 20
"""Of the last episodes whose mean is the return, on both sides."""
VECTORS = (8, 16)


def measure(quick: bool) -> dict[str, object]:
    """One question a task, and one a size of vector."""
    questions: dict[str, object] = {}
    for name, task in TASKS.items():
        if name == "cartpole_balance" and importlib.util.find_spec("mani_skill") is None:
            print(f"\n{name}: ManiSkill is not installed; hatch run embodied:bench embodied")
            continue
        if importlib.util.find_spec("stable_baselines3") is None:
            print("\nstable-baselines3 is not installed; hatch run embodied:bench embodied")
            break
        questions[name] = _training(name, task, quick)
    for count in VECTORS:
        questions[f"{count} vectors of 64x64 RGB"] = _vectors(count, 200 if quick else 1000)
    return questions


def _training(name: str, task: dict, quick: bool) -> dict[str, object]:
    steps = task["steps"] // 4 if quick else task["steps"]
    rows = {kind: _ours(name, task, steps, *told) for kind, told in OURS.items()}
    rivals = {f"sb3 {kind}": _asked("sb3", name, str(steps), kind) for kind in ("subproc", "dummy")}
    best = max(row["steps_per_s"] for row in rivals.values())
    ratios = {kind: row["steps_per_s"] / best for kind, row in rows.items()}
    said = ", ".join(f"{kind} {ratio:.2f} x" for kind, ratio in ratios.items())
    print(f"\n{task['id']}, {task['envs']} environments: {said} SB3's env steps/s")
    for kind, row in {**rows, **rivals}.items():
        seconds = row["seconds_to_target"]
        reached = f"{seconds:.1f} s" if seconds else "not reached"
        print(
            f"  {kind:12} {row['steps_per_s']:>8,.0f} env steps/s, return {task['target']:g} after "
            f"{reached:>12}   last return {row['last_return']:.0f}"
        )
    return {"rows": {**rows, **rivals}, "ratios": ratios}


def _ours(name: str, task: dict, steps: int, *more: str) -> dict[str, float]:
    batch = task["envs"] * task["horizon"]
    with tempfile.TemporaryDirectory() as folder:
        told = (
            f"env={name}",
            f"env.parallelism={task['envs']}",
            f"horizon={task['horizon']}",
            f"steps={steps // batch}",
            f"trainer.minibatch={task['minibatch']}",
            f"trainer.epochs={EPOCHS}",
            f"trainer.optimiser.lr={task['lr']}",
            f"trainer.optimiser.decay_steps={task['decay']}",
            f"policy.std={task['std']}",
            "checkpoint.every=0",
            "film.steps=0",
            f"folder={folder}",
            *more,
        )
        _output(str(MAIN), *told)
        return _seen(Path(folder), task["target"])


def _seen(folder: Path, target: float) -> dict[str, float]:
    """A run by the clock on the wall: what lies between two iterations counts as well.

    In the first one environments are still being made: it counts as the second one does.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    steps, rewards = events.Scalars("env_steps"), events.Scalars("reward")
    begun = 2 * steps[0].wall_time - steps[1].wall_time
    returns = [(one.value, one.wall_time - begun) for one in rewards]
    seconds = steps[-1].wall_time - begun
    return _row(sum(one.value for one in steps), seconds, returns, target)


def _row(steps: float, seconds: float, returns: list, target: float) -> dict[str, float]:
    reached = [t for value, t in returns if value >= target]
    return {
        "steps_per_s": steps / seconds,
        "seconds": seconds,
        "seconds_to_target": float(reached[0]) if reached else 0.0,
        "last_return": float(returns[-1][0]),
    }


def _asked(*arguments: str) -> dict[str, float]:
    """The same question in a fresh process."""
    said = _output("-W", "ignore", __file__, *arguments)
    answer: dict[str, float] = json.loads(said.splitlines()[-1])
    return answer


def _output(*program: str) -> str:
    """What a Python program prints; where it fails, its errors are the end of the benchmark."""
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(program)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _sb3(name: str, steps: int, kind: str) -> dict[str, float]:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

    torch.set_num_threads(1)
    task = TASKS[name]
    makers = [_Maker(task["id"], index) for index in range(task["envs"])]
    kinds = {"subproc": SubprocVecEnv, "dummy": DummyVecEnv}
    worlds = VecMonitor(kinds[kind](makers))
    returns: list[tuple[float, float]] = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            ended = [one["r"] for one in self.model.ep_info_buffer]
            value = float(np.mean(ended)) if ended else float("nan")
            returns.append((value, time.monotonic() - begun))

    model = PPO(
        "MlpPolicy",
        worlds,
        learning_rate=_rate(task, steps),
        n_steps=task["horizon"],
        batch_size=task["minibatch"],
        n_epochs=EPOCHS,
        stats_window_size=WINDOW,
        policy_kwargs={"log_std_init": float(np.log(task["std"]))},
        seed=0,
        device="cpu",
    )
    begun = time.monotonic()
    model.learn(steps, callback=Watch())
    row = _row(model.num_timesteps, time.monotonic() - begun, returns, task["target"])
    worlds.close()
    return row


def _rate(task: dict, steps: int):
    """The rate over the share of steps that are left: as `OptimiserConfig` has it fall."""
    batch = task["envs"] * task["horizon"]
    updates = steps / batch * EPOCHS * (batch // task["minibatch"])

    def rate(left: float) -> float:
        done = (1 - left) * updates
        return task["lr"] * (1 - 0.9 * min(1.0, done / task["decay"]) if task["decay"] else 1.0)

    return rate


class _Maker:
    """Makes an environment where it is called; ManiSkill's as single gymnasium ones."""

    def __init__(self, id: str, index: int) -> None:
        self.id, self.index = id, index

    def __call__(self):
        import gymnasium
        import torch

        torch.set_num_threads(1)
        if not self.id.startswith("MS-"):
            world = gymnasium.make(self.id)
        else:
            from rlinf.workers.environments.maniskill import make

            world = _AsGymnasium(make(self.id))
        world.reset(seed=self.index)
        return world


def _AsGymnasium(world):  # noqa: N802 - a class that needs gymnasium
    """An environment of ours as gymnasium has them, so that both sides step the same one."""
    import gymnasium

    class Wrapped(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(
            -np.inf, np.inf, world.spaces.observation["state"].shape, np.float32
        )
        action_space = gymnasium.spaces.Box(
            np.array(world.spaces.low, np.float32), np.array(world.spaces.high, np.float32)
        )
        episodes = 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.episodes += 1
            state = world.reset(self.episodes if seed is None else seed)["state"]
            return state.copy(), {}

        def step(self, action):
            out = world.step(action)
            state = out.observation["state"].copy()
            return state, out.reward, out.terminated, out.truncated, {}

    return Wrapped()


def _vectors(count: int, steps: int) -> dict[str, object]:
    import harness

    actions = np.random.default_rng(0).uniform(-1, 1, (count, 2)).astype(np.float32)
    stepping, closing = {}, []
    ours = _our_vector(count)
    ours.reset({index: index for index in range(count)})
    stepping["rlinf"] = lambda: _steps(lambda: ours.step(actions[:, None]), steps)
    closing.append(ours.close)
    import gymnasium
    from pixels import Bounce

    makers = [Bounce] * count
    for name, vector in (
        ("gymnasium async", gymnasium.vector.AsyncVectorEnv(makers)),
        ("gymnasium async, no copy", gymnasium.vector.AsyncVectorEnv(makers, copy=False)),
        ("gymnasium sync", gymnasium.vector.SyncVectorEnv(makers)),
    ):
        vector.reset(seed=0)
        stepping[name] = lambda vector=vector: _steps(lambda: vector.step(actions), steps)
        closing.append(vector.close)
    samples = harness.race(stepping, 9, warmup=1, patience_s=30)
    for close in closing:
        close()
    rows = harness.show(
        f"{count} environments of 64x64 RGB, a step of all", samples, "rlinf", each=steps
    )
    rivals = [name for name in samples if "async" in name]
    return {"rows": rows, "ratio": min(harness.ratio(samples, name, "rlinf") for name in rivals)}


def _our_vector(count: int):
    from rlinf.workers.engines.simulation.fleet import SimulatorConfig
    from rlinf.workers.engines.simulation.vector import VectorEnvironment
    from rlinf.workers.environments import EnvironmentSpec

    settings = SimulatorConfig(environments=count, steps=1)
    return VectorEnvironment(EnvironmentSpec("pixels:make", "bounce"), settings)


def _steps(step, count: int) -> None:
    for _ in range(count):
        step()


if __name__ == "__main__":
    import embodied  # so that environments are pickled by name, for processes that import them

    _, name, steps, kind = sys.argv[1:]
    print(json.dumps(embodied._sb3(name, int(steps), kind)))

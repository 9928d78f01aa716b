"""An actor-learner loop with the queues of multiprocessing."""

import argparse
import json
import multiprocessing
import time
from multiprocessing.queues import Queue

import numpy as np

ACTORS = 2


def act(weights: np.ndarray, actor: int, frames: int) -> dict[str, object]:
    """A trajectory of one actor under these weights."""
    seen = np.full((frames, 84, 84, 3), actor, np.uint8)
    return {"actor": actor, "frames": seen, "rewards": np.full(frames, weights.mean())}


def run_actor(actor: int, trajectories: "Queue", news: "Queue", frames: int) -> None:
    """Act until the weights are None."""
    while (weights := news.get()) is not None:
        trajectories.put(act(weights, actor, frames))


def learn(steps: int, frames: int, floats: int) -> None:
    """The learner, which starts the actors."""
    spawn = multiprocessing.get_context("spawn")
    trajectories, news = spawn.Queue(), [spawn.Queue() for _ in range(ACTORS)]
    actors = [
        spawn.Process(target=run_actor, args=(actor, trajectories, news[actor], frames))
        for actor in range(ACTORS)
    ]
    for process in actors:
        process.start()
    weights = np.ones(floats, np.float32)
    start = time.monotonic()
    for step in range(steps + 1):
        if step == 1:
            start = time.monotonic()  # the first one waits for the actors to start
        for queue in news:
            queue.put(weights)
        batch = [trajectories.get() for _ in range(ACTORS)]
        weights = weights + np.float32(0.01 * np.mean([one["rewards"].mean() for one in batch]))
    seconds = (time.monotonic() - start) / steps
    print(json.dumps({"seconds": seconds, "checksum": float(weights.sum())}))
    for queue in news:
        queue.put(None)
    for process in actors:
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--floats", type=int, default=1_000_000)
    args = parser.parse_args()
    learn(args.steps, args.frames, args.floats)

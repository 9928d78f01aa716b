"""The same actor-learner loop over rlinf-comm: a put is a send, a get is a recv."""

import argparse
import json
import multiprocessing
import time

import numpy as np

from rlinf.comm import Endpoint, RegistryClient, RegistryServer

ACTORS = 2
NAMES = [f"actor/{actor}" for actor in range(ACTORS)]


def act(weights: np.ndarray, actor: int, frames: int) -> dict[str, object]:
    """A trajectory of one actor under these weights."""
    seen = np.full((frames, 84, 84, 3), actor, np.uint8)
    return {"actor": actor, "frames": seen, "rewards": np.full(frames, weights.mean())}


def run_actor(actor: int, address: str, token: bytes, frames: int) -> None:
    """Act until the weights are None."""
    with Endpoint(NAMES[actor], registry=RegistryClient(address, token)) as me:
        while (weights := me.recv("learner/0", timeout=60.0)) is not None:
            me.send(act(weights, actor, frames), to="learner/0")


def learn(steps: int, frames: int, floats: int) -> None:
    """The learner, which starts the actors."""
    spawn = multiprocessing.get_context("spawn")
    with RegistryServer() as registry, Endpoint("learner/0", registry=registry) as me:
        actors = [
            spawn.Process(target=run_actor, args=(a, registry.address, registry.token, frames))
            for a in range(ACTORS)
        ]
        for process in actors:
            process.start()
        weights = np.ones(floats, np.float32)
        start = time.monotonic()
        for step in range(steps + 1):
            if step == 1:
                start = time.monotonic()  # the first one waits for the actors to start
            me.broadcast(weights, to=NAMES, timeout=60.0)
            batch = [me.recv(timeout=60.0) for _ in range(ACTORS)]
            weights = weights + np.float32(0.01 * np.mean([one["rewards"].mean() for one in batch]))
        seconds = (time.monotonic() - start) / steps
        print(json.dumps({"seconds": seconds, "checksum": float(weights.sum())}))
        me.broadcast(None, to=NAMES)
        for process in actors:
            process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--floats", type=int, default=1_000_000)
    args = parser.parse_args()
    learn(args.steps, args.frames, args.floats)

"""The same trainer over rlinf-comm: the calls between processes are the lines that changed."""

import argparse
import json
import multiprocessing
import time

import torch

from rlinf.comm import Endpoint, Group, RegistryClient, RegistryServer

WORLD = 3
NAMES = [f"rank/{rank}" for rank in range(WORLD)]


def roll_out(weights: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """What a worker makes of the weights."""
    mean = float(weights["layer0"].mean())
    return {"rank": rank, "reward": mean * rank, "tokens": torch.full((64, 512), rank)}


def run(rank: int, address: str, token: bytes, steps: int, floats: int) -> None:
    """One rank."""
    registry = RegistryClient(address, token)
    with Endpoint(NAMES[rank], registry=registry) as me:
        group = Group(me, NAMES)
        weights = {f"layer{n}": torch.ones(floats // 10) for n in range(10)}
        start = time.monotonic()
        for step in range(steps + 1):
            if step == 1:
                start = time.monotonic()  # the first one makes the connections
            received = group.broadcast(weights if rank == 0 else None, root=NAMES[0])
            rollout = roll_out(received, rank)
            gathered = group.gather(rollout, root=NAMES[0])
            if gathered is not None:
                for weight in weights.values():
                    weight += 0.01 * sum(one["reward"] for one in gathered)
        if rank == 0:
            seconds = (time.monotonic() - start) / steps
            print(json.dumps({"seconds": seconds, "checksum": float(weights["layer9"].sum())}))
        group.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--floats", type=int, default=1_000_000)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with RegistryServer() as registry:
        ranks = [
            spawn.Process(
                target=run, args=(rank, registry.address, registry.token, args.steps, args.floats)
            )
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()

"""A trainer that broadcasts weights and gathers rollouts, with torch.distributed's object calls."""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 3


def roll_out(weights: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """What a worker makes of the weights."""
    mean = float(weights["layer0"].mean())
    return {"rank": rank, "reward": mean * rank, "tokens": torch.full((64, 512), rank)}


def run(rank: int, meeting: str, steps: int, floats: int) -> None:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    weights = {f"layer{n}": torch.ones(floats // 10) for n in range(10)}
    start = time.monotonic()
    for step in range(steps + 1):
        if step == 1:
            start = time.monotonic()  # the first one makes the connections
        box = [weights if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        rollout = roll_out(box[0], rank)
        gathered = [None] * WORLD if rank == 0 else None
        dist.gather_object(rollout, gathered, dst=0)
        if gathered is not None:
            for weight in weights.values():
                weight += 0.01 * sum(one["reward"] for one in gathered)
    if rank == 0:
        seconds = (time.monotonic() - start) / steps
        print(json.dumps({"seconds": seconds, "checksum": float(weights["layer9"].sum())}))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--floats", type=int, default=1_000_000)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [
            spawn.Process(target=run, args=(rank, meeting, args.steps, args.floats))
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()

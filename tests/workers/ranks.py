"""Runs functions on several ranks, each in a process of its own that outlives the call.

    with Ranks(2) as ranks:
        results = ranks.run(function, argument)     # function(team, argument) on each rank

As a program (`python -m tests.workers.ranks`) it is such a process: jobs come in by its standard
input, results go out by its standard output.
"""

import os
import pickle
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """So many processes; each call makes a new team of them."""

    def __init__(self, size: int) -> None:
        program = [sys.executable, "-m", "tests.workers.ranks"]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(program, cwd=ROOT, stdin=pipe, stdout=pipe) for _ in range(size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned. Raises what one of them raised, as text."""
        size = len(self._processes)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank, process in enumerate(self._processes):
            pickle.dump((rank, size, port, function, args), process.stdin)
            process.stdin.flush()
        answers: dict[int, Any] = {}
        waiting = {process.stdout: rank for rank, process in enumerate(self._processes)}
        while waiting:
            for pipe in select.select(list(waiting), [], [])[0]:
                rank = waiting.pop(pipe)
                fine, answers[rank] = pickle.load(pipe)
                # The others may wait for this one for ever.
                assert fine, f"rank {rank}: {answers[rank]}"
        return [answers[rank] for rank in range(size)]


def main() -> None:
    import torch

    from rlinf.workers.team import Team

    torch.set_num_threads(1)
    results, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    while True:
        try:
            rank, size, port, function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        listener = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
        team = Team(rank, size, ("127.0.0.1", port, listener))
        try:
            answer = (True, function(team, *args))
        except Exception:  # noqa: BLE001 - the edge of a process
            answer = (False, traceback.format_exc())
        team.close()
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    main()

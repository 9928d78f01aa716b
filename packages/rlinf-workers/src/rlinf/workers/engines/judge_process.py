"""The process in which a judge runs: `python -m rlinf.workers.engines.judge_process`.

On its standard input come frames (4 bytes of length, then that many): the parent's `sys.path`, a
function that makes the judge, the seconds of processor time for one verdict, the bytes of memory
for all; then, again and again, a response and its item. On its standard output goes a JSON line
a frame: `true` once the judge is made, then `[value, status]` for each response. What the judge
itself prints goes to the standard error.

It ends when its input does; while it judges, the kernel ends it once the processor time is used up.
So it outlives its parent by one verdict at most.
"""

import json
import os
import pickle
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

__all__ = ["frame", "main"]

LENGTH = struct.Struct("<I")


def frame(value: object) -> bytes:
    """`value` as one frame."""
    body = pickle.dumps(value)
    return LENGTH.pack(len(body)) + body


def _next(source: BinaryIO) -> Any:
    """The value of the next frame; ends the process where there is none."""
    head = source.read(LENGTH.size)
    body = source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    if not body:
        sys.exit(0)
    return pickle.loads(body)


def main() -> None:
    """Judge until the input ends."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = _next(source)
    judge, seconds, memory = _next(source)(), _next(source), _next(source)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print("true", file=answers, flush=True)
    while True:
        response, item = _next(source)
        # Counts this process's own time and needs no help of the interpreter to end it.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        score = judge(response, item)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([score.value, score.status]), file=answers, flush=True)


if __name__ == "__main__":
    main()

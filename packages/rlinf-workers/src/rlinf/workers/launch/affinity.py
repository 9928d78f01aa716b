"""Which cores of a machine a process computes on."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["pin"]


def pin(allowed: Sequence[int], cores: Sequence[int]) -> None:
    """Bind every thread of this process to some of the cores that it was allowed at first.

    Threads that are started later inherit it. No cores: all that are allowed.
    """
    chosen = {allowed[core] for core in cores} or set(allowed)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), chosen)

"""OpenMP's threads: they are ended where a computation ends, not left to spin."""

import ctypes
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["end_threads"]

SOFT = 1
"""`omp_pause_soft`: the settings stay."""
LIBRARY = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)\b\S*\.so\S*")


def end_threads() -> None:
    """End the threads that computed for the calling one; its next computation starts new ones.

    Left alone they spin for milliseconds, on cores which are somebody else's by then. And where
    several threads of a process have such helpers, libgomp sees more threads than cores and lets
    all of them sleep between two operations, so that two are as slow as one.
    """
    if "torch" in sys.modules:
        import torch  # noqa: F401 - waits for another thread that is in the middle of it

        for pause in _pauses():
            pause()


@functools.cache
def _pauses() -> tuple[Callable[[], object], ...]:
    """What ends them in each OpenMP library of this process (`omp_pause_resource`, OpenMP 5.0)."""
    found = []
    for path in sorted(set(LIBRARY.findall(Path("/proc/self/maps").read_text()))):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource"):
            device = library.omp_get_initial_device()
            found.append(functools.partial(library.omp_pause_resource, SOFT, device))
    return tuple(found)

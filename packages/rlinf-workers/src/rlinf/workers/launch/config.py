"""The environment of a launched process: the one place of this folder that touches it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf.workers.config import worker_environment

__all__ = ["keep_freed_memory", "limit_threads", "quiet_ray"]

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # a dead worker is reported by its group, once
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep every accelerator visible to every worker
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_worker_niceness": "0",  # Ray gives way to everything else on the machine
    "RAY_enable_metrics_collection": "0",
    "RAY_METRICS_REPORT_INTERVAL_MS": "0",
}

MALLOC = {-1: 1 << 30, -3: 1 << 30, -8: 1}
"""Of glibc's malloc.h: bytes at the end of the heap to keep, bytes from which memory is mapped for
one allocation alone, number of heaps."""


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for what is allocated next.

    By itself it gives blocks of some megabytes back, and the kernel clears them page by page when
    they are wanted again: every tensor of a larger batch, an eighth of a training step. What the
    user has set for malloc stays; a library without `mallopt` is left alone.
    """
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not chosen:
        for option, value in MALLOC.items():
            set_option(option, value)


def limit_threads(threads: int) -> None:
    """Bound the compute threads of libraries which this process has not imported yet."""
    os.environ.update(worker_environment(threads))


@contextmanager
def quiet_ray() -> Iterator[None]:
    """Settings that Ray reads as it starts; what the user has set stays. Restored at the end."""
    added = {name: value for name, value in QUIET_RAY.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)

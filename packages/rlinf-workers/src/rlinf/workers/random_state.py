"""The state of every random generator that a process has globally, as plain data."""

import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["load_random_state", "random_state", "seeded"]

_DRAWING = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's global generator on the CPU as `seed` says; leaves it as it was.

    All threads share that generator: they are let in one after another.
    """
    import torch

    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def random_state() -> dict[str, Any]:
    """Those of Python, numpy and, where they are in use, torch on the CPU and on each GPU; JSON."""
    version, numbers, gauss = random.getstate()
    kept = np.random.get_state(legacy=False)
    assert isinstance(kept, dict)
    inner = {name: _plain(value) for name, value in kept["state"].items()}
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": {**kept, "state": inner},
    }
    if "torch" in sys.modules:
        import torch  # waits for another thread that is in the middle of importing it

        state["torch"] = torch.get_rng_state().tolist()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = [one.tolist() for one in torch.cuda.get_rng_state_all()]
    return state


def load_random_state(state: Mapping[str, Any]) -> None:
    """Let every generator go on from there; GPUs that this process does not have are left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kept = state["numpy"]
    inner = {n: np.array(v, np.uint32) if n == "key" else v for n, v in kept["state"].items()}
    np.random.set_state({**kept, "state": inner})
    if "torch" in state:
        import torch

        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
        for index, one in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.tensor(one, dtype=torch.uint8), index)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value

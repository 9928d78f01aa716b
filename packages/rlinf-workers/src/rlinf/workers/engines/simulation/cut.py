"""A trajectory cut out of a simulator's memory, and the episodes that ended in it."""

import numpy as np

from rlinf.workers.engines.simulation.memory import Memory
from rlinf.workers.roles.simulator import BoolArray, CollectRequest, Episode, Trajectory

__all__ = ["cut_trajectory", "lost_episodes"]


def cut_trajectory(
    memory: Memory, own: slice, request: CollectRequest, version: int, lost: bool
) -> Trajectory:
    """Copy the rows of a request; what a lost process did not complete is not valid.

    Where the valid decisions of an environment stop before the last row without an end of its
    episode, they end truncated, with what was shown last.
    """
    rows = slice(0, request.steps)
    valid: BoolArray = memory["valid"][rows, own].copy()
    terminated = memory["terminated"][rows, own] & valid
    truncated = memory["truncated"][rows, own] & valid
    ended = terminated | truncated
    finals = {name: array[rows, own] for name, array in memory.final.items()}
    cuts = _cuts(valid, ended)
    truncated[tuple(cuts.T)] = True
    ends = np.argwhere(terminated | truncated).astype(np.int32)
    last = {name: array[tuple(ends.T)] for name, array in finals.items()}  # a copy
    was_cut = ~ended[tuple(ends.T)]
    for name, array in memory.shown.items():
        t, e = ends[was_cut].T
        last[name][was_cut] = array[:, own][t + 1, e]
    shown = {name: array[: request.steps + 1, own].copy() for name, array in memory.shown.items()}
    return Trajectory(
        uid=request.uid,
        environments=np.arange(own.start, own.stop, dtype=np.int32),
        observations=shown,
        choices=memory["choices"][rows, own].copy(),
        logprobs=memory["logprobs"][rows, own].copy(),
        rewards=np.where(valid, memory["rewards"][rows, own], 0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        steps=np.where(valid, memory["steps"][rows, own], 0).astype(np.int32),
        finals=last,
        ends=ends,
        episodes=_episodes(memory, own, ended) + (lost_episodes(memory, own) if lost else ()),
        seeds=memory["seed"][own].copy(),
        version=version,
    )


def _cuts(valid: BoolArray, ended: BoolArray) -> "np.ndarray[tuple[int, int], np.dtype[np.intp]]":
    """(t, e) of the last valid decision of each environment that stops early without an end."""
    count = valid.sum(0)
    e = np.flatnonzero((count > 0) & (count < len(valid)))
    t = count[e] - 1
    early = ~ended[t, e]
    return np.stack([t[early], e[early]], 1)


def _episodes(memory: Memory, own: slice, ended: BoolArray) -> tuple[Episode, ...]:
    found = []
    for t, e in np.argwhere(ended):
        index = own.start + int(e)
        found.append(
            Episode(
                environment=index,
                seed=int(memory["ended_seed"][t, index]),
                reward=float(memory["ended_reward"][t, index]),
                steps=int(memory["ended_steps"][t, index]),
                success=bool(memory["ended_success"][t, index]),
            )
        )
    return tuple(found)


def lost_episodes(memory: Memory, own: slice) -> tuple[Episode, ...]:
    """The episodes that were under way when their process was lost."""
    return tuple(
        Episode(
            environment=index,
            seed=int(memory["seed"][index]),
            reward=float(memory["reward"][index]),
            steps=int(memory["length"][index]),
            success=bool(memory["success"][index]),
            lost=True,
        )
        for index in range(own.start, own.stop)
        if not memory["resting"][index]
    )

"""The environments of one process over the shared memory."""

from dataclasses import dataclass, field

import numpy as np

from rlinf.workers.engines.simulation.memory import Memory, Sizes
from rlinf.workers.engines.simulation.seeds import episode_seed
from rlinf.workers.environments import EnvironmentSpec, make_environment
from rlinf.workers.roles.simulator import Actor, Environment, Observation, Spaces

__all__ = ["Opening", "Stepper"]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a process is told first. With `spaces` None it only says what the spaces are.

    Attributes:
        path: The parent's `sys.path`.
        spec: Of the environments.
        first: Index of its first environment.
        count: How many it has.
        seed: Of the simulator.
        spaces: Of the environments.
        sizes: Of the memory.
        descriptor: Of the memory, inherited.
        actor: Acts here, if it is light.
        film: Not 0: act so many steps at most without noise, and only say what that looked like.
        demonstrate: Not 0: let the environment's script act so many steps at most, in an episode
            for each of `seeds`.
        noise: Of the motions that are carried out then.
        seeds: See `demonstrate`.
    """

    path: tuple[str, ...]
    spec: EnvironmentSpec
    first: int = 0
    count: int = 1
    seed: int = 0
    spaces: Spaces | None = None
    sizes: Sizes | None = None
    descriptor: int = -1
    actor: Actor | None = field(default=None, repr=False)
    film: int = 0
    demonstrate: int = 0
    noise: float = 0.0
    seeds: tuple[int, ...] = ()


class Stepper:
    """Environments that are stepped one after another."""

    def __init__(self, opening: Opening, spaces: Spaces, sizes: Sizes) -> None:
        self._first, self._seed, self._actor = opening.first, opening.seed, opening.actor
        self._own = slice(opening.first, opening.first + opening.count)
        self._memory = Memory(spaces, sizes, opening.descriptor)
        self._worlds: list[Environment] = []
        self._make(opening)
        self._low = np.array(spaces.low, np.float32)
        self._high = np.array(spaces.high, np.float32)

    def _make(self, opening: Opening) -> None:
        memory = self._memory
        for index in range(self._own.start, self._own.stop):
            memory["busy"][index] = True
            self._worlds.append(make_environment(opening.spec))
            memory["busy"][index] = False
            memory["ticks"][index] += 1

    def begin(self) -> None:
        """Row 0: what was shown last, or a new episode where `begin` has a seed (else -1)."""
        memory = self._memory
        memory["valid"][:, self._own] = False
        fresh: list[int] = []
        for index in range(self._own.start, self._own.stop):
            if memory["begin"][index] >= 0:
                fresh.append(index)
            elif row := memory["row"][index]:
                self._show({n: a[row, index] for n, a in memory.shown.items()}, index, 0)
        if fresh:
            self._reset(fresh, 0, [int(memory["begin"][index]) for index in fresh])
            memory["begin"][fresh] = -1
        if self._actor is not None:
            self._actor.load(memory["weights"])

    def step(self, t: int) -> None:
        """Carry out every environment's decision of row t."""
        actions = self._memory["actions"][t, self._own]
        np.clip(actions, self._low, self._high, out=actions)
        self._step(t)

    def act(self, steps: int) -> None:
        """Choose and carry out the decisions of rows 0 to steps - 1."""
        memory, own, actor = self._memory, self._own, self._actor
        assert actor is not None
        greedy = bool(memory["greedy"][own.start])
        for t in range(steps):
            shown = {name: array[t, own] for name, array in memory.shown.items()}
            decision = actor.act(shown, None if greedy else memory["noise"][t, own])
            memory["choices"][t, own] = decision.choices
            memory["actions"][t, own] = decision.actions
            memory["logprobs"][t, own] = decision.logprobs
            self.step(t)
            if memory["resting"][own].all():
                return

    def _step(self, t: int) -> None:
        for index in range(self._own.start, self._own.stop):
            if not self._memory["resting"][index]:
                self._carry_out(index, t)

    def _carry_out(self, index: int, t: int) -> None:
        memory, world = self._memory, self._worlds[index - self._first]
        total, count, over = 0.0, 0, False
        for action in memory["actions"][t, index]:
            memory["busy"][index] = True
            outcome = world.step(action)
            memory["busy"][index] = False
            memory["ticks"][index] += 1
            total, count = total + outcome.reward, count + 1
            memory["success"][index] |= outcome.success
            if over := outcome.terminated or outcome.truncated:
                break
        memory["rewards"][t, index] = total
        memory["steps"][t, index] = count
        memory["terminated"][t, index] = outcome.terminated
        memory["truncated"][t, index] = outcome.truncated and not outcome.terminated
        memory["reward"][index] += total
        memory["length"][index] += count
        if not over:
            self._show(outcome.observation, index, t + 1)
        elif self._end(index, t, outcome.observation):
            self._reset([index], t + 1, [self._next_seed(index)])
        memory["valid"][t, index] = True

    def _end(self, index: int, t: int, last: Observation) -> bool:
        """Keep what an episode ended with; whether another one begins."""
        memory = self._memory
        for name, array in memory.final.items():
            array[t, index] = last[name]
        for ended, now in (("seed",) * 2, ("reward",) * 2, ("steps", "length"), ("success",) * 2):
            memory[f"ended_{ended}"][t, index] = memory[now][index]
        if memory["rests"][index]:
            memory["resting"][index] = True
            self._show(last, index, t + 1)
        return not memory["rests"][index]

    def _next_seed(self, index: int) -> int:
        self._memory["episode"][index] += 1
        return episode_seed(self._seed, index, int(self._memory["episode"][index]))

    def _reset(self, indexes: list[int], t: int, seeds: list[int]) -> None:
        """Begin episodes, shown in row t."""
        memory = self._memory
        for index, seed in zip(indexes, seeds, strict=True):
            memory["busy"][index] = True
            shown = self._worlds[index - self._first].reset(seed)
            memory["busy"][index] = False
            memory["ticks"][index] += 1
            self._begun(index, t, seed, shown)

    def _begun(self, index: int, t: int, seed: int, shown: Observation) -> None:
        memory = self._memory
        memory["seed"][index], memory["reward"][index], memory["length"][index] = seed, 0.0, 0
        memory["success"][index] = memory["resting"][index] = False
        self._show(shown, index, t)

    def _show(self, shown: Observation, index: int, t: int) -> None:
        for name, array in self._memory.shown.items():
            array[t, index] = shown[name]
        self._memory["row"][index] = t

"""Models beside the fast things: brute force, and a simulator that shares no code with the search.

Small on purpose, in plain Python, so that they can be believed by reading.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from rlinf.sched.graph import Component, FlowGraph
from rlinf.sched.profile import ComponentProfile, Law, Profile
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree, leaves


@dataclass(frozen=True)
class Problem:
    """A small workflow to plan.

    Attributes:
        switching: (onload, offload) seconds of each component.
        micro_batches: numbers of micro-batches to choose from, beside 1.
    """

    graph: FlowGraph
    laws: Mapping[str, Law]
    switching: Mapping[str, tuple[float, float]]
    devices: int
    batch: int
    micro_batches: tuple[int, ...] = (2, 4)

    def profile(self) -> Profile:
        """The same as a profile for the search."""
        return Profile(
            {
                name: ComponentProfile(
                    law=self.laws[name],
                    onload_s=self.switching[name][0],
                    offload_s=self.switching[name][1],
                )
                for name in self.graph.names
            }
        )


def run_micro_batches(problem: Problem, tree: Tree) -> float:
    """Execute a plan micro-batch by micro-batch; seconds until the last one is done."""
    return _Execution(problem).run(tree, 0.0, 1)


@dataclass
class _Execution:
    problem: Problem
    finished: dict[str, list[float]] = field(default_factory=dict)

    def run(self, tree: Tree, start: float, inherited: int) -> float:
        if isinstance(tree, Leaf):
            return self._leaf(tree, start, inherited)
        if isinstance(tree, Temporal):
            end = self.run(tree.first, start, inherited)
            return self.run(tree.second, end + self._switch(tree), inherited)
        if isinstance(tree, Loop):
            raise NotImplementedError("cycles are simulated by rounds_of()")
        inner = tree.micro_batches if isinstance(tree, Spatial) else inherited
        return max(self.run(tree.first, start, inner), self.run(tree.second, start, inner))

    def _leaf(self, leaf: Leaf, start: float, inherited: int) -> float:
        problem = self.problem
        parts = leaf.micro_batches or inherited
        seconds = problem.laws[leaf.component](leaf.devices, problem.batch / parts)
        feeders = [a for a, b in problem.graph.edges if b == leaf.component]
        now, done = start, []
        for k in range(parts):
            for feeder in feeders:
                ends = self.finished.get(feeder, [0.0])
                now = max(now, ends[math.ceil((k + 1) * len(ends) / parts) - 1])
            now += seconds
            done.append(now)
        self.finished[leaf.component] = done
        return now

    def _switch(self, tree: Temporal) -> float:
        switching = self.problem.switching
        off = max(switching[leaf.component][1] for leaf in leaves(tree.first))
        on = max(switching[leaf.component][0] for leaf in leaves(tree.second))
        return off + on


def rounds_of(times: Sequence[float], rounds: int, parts: int) -> float:
    """Execute a cycle whose members each work on one part at a time."""
    free = [0.0] * len(times)
    where = [0.0] * parts
    for _ in range(rounds):
        for part in range(parts):
            for member, seconds in enumerate(times):
                where[part] = free[member] = max(where[part], free[member]) + seconds
    return max(where)


def every_plan(problem: Problem, *, prefixes: bool = False) -> Iterator[Tree]:
    """Every plan tree: every down-set cut, split of devices, and number of micro-batches.

    Inside a pipelined segment each component works in its micro-batches; of two parts in turn
    either may stand outside the segment, and then has the whole batch at once.

    Args:
        prefixes: cut only along one topological order, as the published planner does.
    """
    names = problem.graph.order()
    index = {name: i for i, name in enumerate(names)}
    edges = [(index[a], index[b]) for a, b in problem.graph.edges]
    sizes = [problem.graph[n].sizes or range(1, problem.devices + 1) for n in names]

    @cache
    def plans(members: frozenset[int], devices: int, segment: int) -> tuple[Tree, ...]:
        if len(members) == 1:
            (i,) = members
            return tuple(Leaf(names[i], n, segment) for n in sizes[i] if n <= devices)
        found: list[Tree] = []
        for first, second in _prefixes(members) if prefixes else _cuts(members, edges):
            edge = any(a in first and b in second for a, b in edges)
            for one, two in {(1, 1), (1, segment), (segment, 1), (segment, segment)}:
                found += [
                    Temporal(p, q)
                    for p in plans(first, devices, one)
                    for q in plans(second, devices, two)
                ]
            for n in range(1, devices):
                for parts in (1, *problem.micro_batches) if segment == 1 else (segment,):
                    found += [
                        Spatial(p, q, parts)
                        for p in plans(first, n, parts)
                        for q in plans(second, devices - n, parts)
                    ]
                if not edge and segment == 1:
                    found += [
                        Parallel(p, q)
                        for p in plans(first, n, 1)
                        for q in plans(second, devices - n, 1)
                    ]
        return tuple(found)

    yield from plans(frozenset(range(len(names))), problem.devices, 1)


def brute_force(problem: Problem, *, prefixes: bool = False) -> tuple[float, Tree | None]:
    """The quickest of all plans, or of those :func:`every_plan` limits; infinite where none is."""
    best: tuple[float, Tree | None] = (math.inf, None)
    for tree in every_plan(problem, prefixes=prefixes):
        seconds = run_micro_batches(problem, tree)
        if seconds < best[0]:
            best = seconds, tree
    return best


def random_problem(
    rng: random.Random, count: int, devices: int, density: float | None = None
) -> Problem:
    """A random workflow: a chain, or with ``density`` a graph with that share of the edges."""
    names = [f"c{i}" for i in range(count)]
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    if density is None:
        edges = [(i, j) for i, j in pairs if j == i + 1]
    else:
        edges = [pair for pair in pairs if rng.random() < density]
    unit = {name: rng.choice([1, 1, 2]) if devices >= 4 else 1 for name in names}
    sizes = {
        name: [n for n in range(unit[name], devices + 1, unit[name]) if rng.random() < 0.85]
        for name in names
    }
    return Problem(
        FlowGraph(
            tuple(Component(n, tuple(sizes[n] or [unit[n]])) for n in names),
            tuple((names[i], names[j]) for i, j in edges),
        ),
        {name: _random_law(rng) for name in names},
        {name: (rng.choice([0, 0.5]), rng.choice([0, 0.5])) for name in names},
        devices,
        batch=8,
    )


def _random_law(rng: random.Random) -> Law:
    work, power = rng.uniform(5, 60), rng.uniform(0.5, 1.0)
    overhead, serial = rng.choice([0, 0.05, 0.2]), rng.choice([0, 0, 0.1]) * work
    return lambda n, b: overhead + b / 8 * (work / n**power + serial)


def _cuts(
    members: frozenset[int], edges: Sequence[tuple[int, int]]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    ordered = sorted(members)
    for mask in range(1, (1 << len(ordered)) - 1):
        first = frozenset(i for k, i in enumerate(ordered) if mask >> k & 1)
        second = members - first
        if not any(a in second and b in first for a, b in edges):
            yield first, second


def _prefixes(members: frozenset[int]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    ordered = sorted(members)
    for count in range(1, len(ordered)):
        yield frozenset(ordered[:count]), frozenset(ordered[count:])

"""Prices: what each component costs on each number of devices, and what a switch costs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlinf.sched.errors import InfeasibleError
from rlinf.sched.fit import Floats
from rlinf.sched.graph import Component, FlowGraph
from rlinf.sched.machine import Counts, Machine, any_size
from rlinf.sched.profile import ComponentProfile, Profile, between_memories
from rlinf.sched.times import TimeTable
from rlinf.sched.tree import ANY_TYPE, Leaf, Loop

CORE_SHARES = (1.0, 0.5, 0.25)
"""Portions of the cores it would like which a component is offered."""


@dataclass(frozen=True, slots=True)
class Options:
    """The ways to run one component, none worse than another in everything.

    Attributes:
        used: resources taken; shape (k, resources).
        seconds: for one part of the batch; shape (k,).
        name: the component.
        devices: how many devices; shape (k,).
        kinds: device type of each; empty where there is only one.
        loops: for a cycle, how its members go round; else empty.
        has_cores: the last resource is processor cores.
    """

    used: Counts
    seconds: Floats
    name: str
    devices: Counts
    kinds: tuple[str, ...] = ()
    loops: tuple[Loop, ...] = ()
    has_cores: bool = False

    def leaf(self, k: int, micro_batches: int | None) -> Leaf | Loop:
        """The node of a plan for option ``k``."""
        if self.loops:
            return self.loops[k]
        kind = self.kinds[k] if self.kinds else ANY_TYPE
        cores = int(self.used[k, -1]) if self.has_cores else 0
        return Leaf(self.name, int(self.devices[k]), micro_batches, kind, cores)

    def take(self, keep: Counts) -> "Options":
        """Only the options with these indexes."""
        return Options(
            self.used[keep],
            self.seconds[keep],
            self.name,
            self.devices[keep],
            tuple(self.kinds[k] for k in keep) if self.kinds else (),
            tuple(self.loops[k] for k in keep) if self.loops else (),
            self.has_cores,
        )


class CostModel:
    """A workflow with its cycles condensed, priced by a profile on a machine.

    Components are numbered in topological order; sets of them are bit masks.
    """

    def __init__(self, graph: FlowGraph, profile: Profile, machine: Machine, batch: int) -> None:
        condensed, self.members = graph.condensed()
        self.graph, self.profile, self.machine, self.batch = graph, profile, machine, batch
        self.names = condensed.order()
        self.components = [condensed[name] for name in self.names]
        index = {name: i for i, name in enumerate(self.names)}
        count = len(self.names)
        self.succ, self.pred = [0] * count, [0] * count
        for source, target in condensed.edges:
            self.succ[index[source]] |= 1 << index[target]
            self.pred[index[target]] |= 1 << index[source]
        self.anc = [0] * count
        for i in range(count):
            for before in bits(self.pred[i]):
                self.anc[i] |= 1 << before | self.anc[before]
        self._drop_implied_edges()
        self.depth = [0] * count
        for i in range(count):
            self.depth[i] = max((self.depth[a] + 1 for a in bits(self.pred[i])), default=0)
        self.height = [0] * count
        for i in reversed(range(count)):
            self.height[i] = max((self.height[b] + 1 for b in bits(self.succ[i])), default=0)
        self.chain = all(self.pred[i] == (1 << i) >> 1 for i in range(count))
        self._tables: dict[tuple[int, str], dict[float, TimeTable]] = {}
        self._sizes: dict[tuple[int, int], Floats] = {}
        self._options: dict[tuple[int, int, int], Options] = {}
        self._leaves: dict[tuple[object, ...], float] = {}
        self._on = [self._moving(i, "onload_s") for i in range(count)]
        self._off = [self._moving(i, "offload_s") for i in range(count)]
        self.switching = any(self._on) or any(self._off)
        inner = [n for i in range(count) for n in self.parts_of(i)]
        self.tight = bool(profile.memory_bytes) and any(
            profile[n].active_bytes or profile[n].resident_bytes for n in inner
        )

    def _drop_implied_edges(self) -> None:
        """Whoever waits for b, which waits for a, need not be told to wait for a."""
        for i in range(len(self.names)):
            for before in bits(self.pred[i]):
                self.pred[i] &= ~self.anc[before]
        for a in range(len(self.names)):
            self.succ[a] = sum(1 << i for i in bits(self.succ[a]) if self.pred[i] >> a & 1)

    def leaf_seconds(self, leaf: Leaf, items: float, beside: int = 0) -> float:
        """Seconds of one leaf of a plan for ``items`` items.

        Args:
            beside: components that idle in the memory of its devices meanwhile.
        """
        key = (leaf.component, leaf.devices, leaf.device_type, leaf.cores, items, beside)
        if key not in self._leaves:
            self._leaves[key] = self._leaf_seconds(leaf, items, beside)
        return self._leaves[key]

    def _leaf_seconds(self, leaf: Leaf, items: float, beside: int) -> float:
        entry = self.profile[leaf.component]
        size = np.array([leaf.devices], float)
        idle = sum(self.profile[n].resident_bytes for i in bits(beside) for n in self.parts_of(i))
        free = np.array([self.profile.memory(leaf.device_type) - idle / leaf.devices])
        seconds = float(self._times(entry, size, items, leaf.device_type, free)[0])
        wanted = np.ceil(entry.cores * leaf.devices)
        return seconds * max(1.0, wanted / leaf.cores) if leaf.cores else seconds

    def parts_of(self, i: int) -> tuple[str, ...]:
        """The component itself, or the members of the cycle it stands for."""
        return self.members.get(self.names[i], (self.names[i],))

    def own_profile(self, i: int) -> ComponentProfile | None:
        """The profile under the component's own name, if there is one."""
        return self.profile.components.get(self.names[i])

    def chunkable(self, i: int) -> bool:
        """It may be a stage of a pipeline."""
        return self.components[i].chunked

    def switch(self, first: int, second: int) -> float:
        """Seconds to take one set out of memory and bring another in."""
        return max(self._off[i] for i in bits(first)) + max(self._on[i] for i in bits(second))

    def options(self, i: int, parts: int, beside: int = 0) -> Options:
        """The ways to run component ``i`` on one of ``parts`` parts of the batch.

        Args:
            beside: components that idle in the memory of its devices meanwhile.
        """
        key = (i, parts, beside)
        if key not in self._options:
            if self.names[i] in self.members and self.own_profile(i) is None:
                found = self._loop_options(i, beside)
            else:
                found = self._plain_options(i, self.batch / parts, beside)
            self._options[key] = thin(found)
        return self._options[key]

    def explain_infeasible(self) -> InfeasibleError:
        """Why nothing fits, with the arithmetic."""
        reasons = []
        for i, name in enumerate(self.names):
            if not len(self.options(i, 1).seconds):
                reasons.append(self._why_not(i, name))
        return InfeasibleError(tuple(reasons) or ("no way to lay the components out was found",))

    def _why_not(self, i: int, name: str) -> str:
        counts = dict(zip(self.machine.types, self.machine.counts.tolist(), strict=False))
        have = ", ".join(f"{n} of {t}" if t else str(n) for t, n in counts.items())
        least = min(self.components[i].sizes, default=1)
        if least > max(counts.values()):
            return f"{name} needs {least} devices, have {have}"
        node = self.machine.node
        if self.components[i].node_local and node and least > node:
            return f"{name} needs {least} devices on one node, a node has {node}"
        if len(self.parts_of(i)) > 1:
            return f"the cycle {name} does not fit on {have} devices"
        entry = self.profile[name]
        if not any(entry.runs_on(kind) for kind in counts):
            return f"{name} was measured on {', '.join(entry.types())} only, have {have}"
        kind = max(counts, key=lambda t: counts[t])
        most = int(self.sizes(self.components[i], counts[kind])[-1])
        each, limit = entry.active_bytes / most, self.profile.memory(kind)
        if each > limit:
            return (
                f"{name} needs {entry.active_bytes:.4g} bytes / {most} devices = {each:.4g} bytes "
                f"on each, a device has {limit:.4g}"
            )
        return f"{name} needs {entry.cores:g} cores a device, have {self.profile.cores:g} in all"

    def _plain_options(self, i: int, items: float, beside: int) -> Options:
        return self._sized(self.components[i], self.profile[self.names[i]], items, beside)

    def member_options(self, name: str, items: float, beside: int) -> Options:
        """The ways to run one member of a cycle for one round."""
        return thin(self._sized(self.graph[name], self.profile[name], items, beside))

    def _sized(
        self, component: Component, entry: ComponentProfile, items: float, beside: int
    ) -> Options:
        found = []
        width = len(self.machine.counts)
        for t, kind in enumerate(self.machine.types):
            if not entry.runs_on(kind):
                continue
            count = int(self.machine.counts[t])
            sizes, free = self._fitting(entry, self.sizes(component, count), kind, beside)
            if not len(sizes):
                continue
            times = self._times(entry, sizes, items, kind, free)
            for share in CORE_SHARES if self.machine.has_cores and entry.cores else (1.0,):
                used = np.zeros((len(sizes), width), np.int64)
                used[:, t] = sizes
                if self.machine.has_cores:
                    used[:, -1] = np.ceil(entry.cores * sizes * share)
                found.append((used, times / share, [kind] * len(sizes) if kind else [], used[:, t]))
        return _gather(found, component.name, self.machine)

    def sizes(self, component: Component, count: int) -> Floats:
        """Numbers of devices that a component may have, of ``count``; increasing."""
        key = (id(component), count)
        if key not in self._sizes:
            known = component.sizes or any_size(count, self.machine.node)
            most = min(count, self.machine.node or count) if component.node_local else count
            self._sizes[key] = np.array([n for n in known if n <= most], float)
        return self._sizes[key]

    def _times(
        self, entry: ComponentProfile, sizes: Floats, items: float, kind: str, free: Floats
    ) -> Floats:
        if entry.law is not None:
            return entry.seconds(sizes, items, kind)
        key = (id(entry), kind)
        if key not in self._tables:
            self._tables[key] = entry.tables(kind)
        tables = self._tables[key]
        logs = np.log(sizes)
        curves = [table.at(logs, items) for table in tables.values()]
        if len(curves) == 1:
            return curves[0]
        whole = self.profile.memory(kind)
        levels, stacked = [min(level, whole) for level in tables], np.stack(curves)
        each = [
            between_memories(levels, list(stacked[:, k : k + 1]), float(free[k]))
            for k in range(len(sizes))
        ]
        return np.concatenate(each)

    def _fitting(
        self, entry: ComponentProfile, sizes: Floats, kind: str, beside: int
    ) -> tuple[Floats, Floats]:
        """The sizes whose devices have the memory, and what is free on each of those."""
        limit = self.profile.memory(kind)
        if not np.isfinite(limit):
            return sizes, np.full(len(sizes), np.inf)
        idle = sum(self.profile[n].resident_bytes for i in bits(beside) for n in self.parts_of(i))
        free = limit - idle / sizes
        fits = entry.active_bytes / sizes <= free
        return sizes[fits], free[fits]

    def _loop_options(self, i: int, beside: int) -> Options:
        """A cycle: its members in turn on the same devices, or apart and in alternation."""
        from rlinf.sched.cycle import loop_options

        return loop_options(self, i, beside)

    def _moving(self, i: int, what: str) -> float:
        entries: Mapping[str, ComponentProfile] = self.profile.components
        own = entries.get(self.names[i])
        names = [self.names[i]] if own is not None else self.parts_of(i)
        return max(float(getattr(self.profile[n], what)) for n in names)


def bits(mask: int) -> list[int]:
    """The members of a set given as a bit mask."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def thin(options: Options) -> Options:
    """Only the options that are not worse than another one in everything."""
    used, seconds = options.used, options.seconds
    order = np.lexsort((seconds, *used.T[::-1]))
    used, seconds = used[order], seconds[order]
    if used.shape[1] == 1:
        best = np.minimum.accumulate(np.r_[np.inf, seconds])[:-1]
        keep = np.flatnonzero(seconds < best)
    else:
        keep = np.array(
            [
                k
                for k in range(len(seconds))
                if not ((used[:k] <= used[k]).all(axis=1) & (seconds[:k] <= seconds[k])).any()
            ],
            np.int64,
        )
    return options.take(order[keep])


def _gather(
    found: list[tuple[Counts, Floats, list[str], Counts]], name: str, machine: Machine
) -> Options:
    counts = machine.counts
    if not found:
        empty = np.zeros(0, np.int64)
        return Options(np.zeros((0, len(counts)), np.int64), np.zeros(0), name, empty)
    used = np.concatenate([u for u, *_ in found])
    seconds = np.concatenate([s for _, s, *_ in found])
    kinds = tuple(k for _, _, ks, _ in found for k in ks)
    devices = np.concatenate([d for *_, d in found])
    whole = Options(used, seconds, name, devices, kinds, (), machine.has_cores)
    return whole.take(np.flatnonzero((used <= counts).all(axis=1)))

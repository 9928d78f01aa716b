"""The workflow: components and which feeds which."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlinf.sched.errors import GraphError


@dataclass(frozen=True, slots=True)
class Component:
    """One part of the workflow.

    Attributes:
        name: unique in its graph.
        sizes: device counts it can run on (tensor x pipeline x data parallel); empty: any.
        chunked: it can work on a part of the batch, so that it may be pipelined.
        node_local: it takes at most the devices of one node.
    """

    name: str
    sizes: tuple[int, ...] = ()
    chunked: bool = True
    node_local: bool = False

    def __post_init__(self) -> None:
        if not self.name or any(c.isspace() for c in self.name):
            raise GraphError(f"component name {self.name!r} must be non-empty and without spaces")
        if any(size < 1 for size in self.sizes):
            raise GraphError(f"component {self.name!r}: sizes must be positive, are {self.sizes}")
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    def fits(self, devices: int) -> int:
        """The largest valid size up to ``devices``; 0 where none is."""
        if not self.sizes:
            return devices
        return max((size for size in self.sizes if size <= devices), default=0)


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """Components and directed edges; cycles are allowed.

    Attributes:
        components: in any order; names are unique.
        edges: (producer, consumer) pairs of component names.
    """

    components: tuple[Component, ...]
    edges: tuple[tuple[str, str], ...]
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", tuple(self.components))
        object.__setattr__(self, "edges", tuple(dict.fromkeys((a, b) for a, b in self.edges)))
        names = [component.name for component in self.components]
        if not names:
            raise GraphError("a workflow needs at least one component")
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise GraphError(f"component names repeat: {', '.join(repeated)}")
        object.__setattr__(self, "_index", {name: i for i, name in enumerate(names)})
        for a, b in self.edges:
            for name in (a, b):
                if name not in self._index:
                    raise GraphError(f"edge {a} -> {b}: no component {name!r}; known: {names}")

    @classmethod
    def chain(cls, *components: Component | str) -> "FlowGraph":
        """Components which feed one another in the order given."""
        nodes = tuple(c if isinstance(c, Component) else Component(c) for c in components)
        names = [node.name for node in nodes]
        return cls(nodes, tuple(itertools.pairwise(names)))

    @property
    def names(self) -> tuple[str, ...]:
        """Component names in the order given."""
        return tuple(component.name for component in self.components)

    def __getitem__(self, name: str) -> Component:
        if name not in self._index:
            raise GraphError(f"no component {name!r}; known: {', '.join(self.names)}")
        return self.components[self._index[name]]

    def cycles(self) -> tuple[tuple[str, ...], ...]:
        """The strongly connected parts of more than one component (or with a self edge)."""
        if self._acyclic_order() is not None:
            return ()
        import networkx

        graph = networkx.DiGraph(list(self.edges))
        loops = {a for a, b in self.edges if a == b}
        parts = networkx.strongly_connected_components(graph)
        found = [p for p in parts if len(p) > 1 or p & loops]
        return tuple(tuple(n for n in self.names if n in p) for p in found)

    def order(self) -> tuple[str, ...]:
        """Topological order, ties as given; the members of a cycle stand side by side."""
        plain = self._acyclic_order()
        if plain is not None:
            return plain
        member = {name: cycle for cycle in self.cycles() for name in cycle}
        condensed, _ = self.condensed()
        return tuple(
            inner
            for outer in condensed.order()
            for inner in next((c for c in member.values() if cycle_name(c) == outer), (outer,))
        )

    def condensed(self) -> tuple["FlowGraph", Mapping[str, tuple[str, ...]]]:
        """The graph with every cycle as one component, and the members of those."""
        members = {cycle_name(cycle): cycle for cycle in self.cycles()}
        if not members:
            return self, {}
        outer = {name: name for name in self.names}
        outer |= {name: joined for joined, cycle in members.items() for name in cycle}
        nodes: dict[str, Component] = {}
        for component in self.components:
            name = outer[component.name]
            whole = name in members
            nodes.setdefault(name, Component(name, chunked=False) if whole else component)
        edges = ((outer[a], outer[b]) for a, b in self.edges)
        return FlowGraph(tuple(nodes.values()), tuple(e for e in edges if e[0] != e[1])), members

    def _acyclic_order(self) -> tuple[str, ...] | None:
        waiting = dict.fromkeys(self.names, 0)
        for _, b in self.edges:
            waiting[b] += 1
        ready = [name for name in self.names if not waiting[name]]
        order: list[str] = []
        while ready:
            name = min(ready, key=self._index.__getitem__)
            ready.remove(name)
            order.append(name)
            for a, b in self.edges:
                if a == name:
                    waiting[b] -= 1
                    if not waiting[b]:
                        ready.append(b)
        return tuple(order) if len(order) == len(self.components) else None


def cycle_name(members: Iterable[str]) -> str:
    """The name of a cycle treated as one component."""
    return "+".join(members)

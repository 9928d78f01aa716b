"""Plans: frozen, readable, saved and loaded as YAML."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlinf.sched import document
from rlinf.sched.document import Node, PlainData
from rlinf.sched.errors import InfeasibleError, PlanError
from rlinf.sched.graph import Component, FlowGraph
from rlinf.sched.plan_document import FORMAT, plain_tree, read_tree
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree, draw, leaves, spans

LISTED = 16
"""So many devices are listed by name in a document, more only counted where that says the same."""

MOST_DEVICES = 1_000_000
"""More than these are taken for a slip of the keyboard."""

Kind = Literal["hybrid", "single", "spatial", "temporal"]
DeviceNames = Sequence[str] | int
"""Names such as ``("core:0", "core:1")``, or a number, which stands for ``device:0`` and so on."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one component runs, and in what portions.

    Attributes:
        chunk: items it takes at a time; None: the whole batch of the iteration at once.
        shared: another component uses some of its devices too, so it must hold their lock.
        position: its place in a topological order, from 0.
    """

    component: str
    devices: tuple[str, ...]
    chunk: int | None
    shared: bool
    position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where, when and in what portions each component runs.

    Attributes:
        root: the tree of components.
        devices: names, each ``type:index``.
        batch: items an iteration.
        seconds: predicted length of an iteration; None where no profile was at hand.
        staleness: iterations which the weights used for generation may lag behind.
        bound: the prediction is at most this fraction above the best plan.
    """

    root: Tree
    devices: tuple[str, ...]
    batch: int
    seconds: float | None = None
    staleness: int = 0
    bound: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", device_names(self.devices))
        if self.batch < 1:
            raise PlanError("batch", f"must be positive, is {self.batch}")
        names = [leaf.component for leaf in leaves(self.root)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise PlanError("tree", f"components appear more than once: {', '.join(repeated)}")
        self._check_devices()

    @property
    def kind(self) -> Kind:
        """Which of the four kinds of execution this is."""
        return kind_of(self.root)

    def tree(self) -> str:
        """The plan as an indented text."""
        time = "" if self.seconds is None else f", {self.seconds:.4g} s"
        lag = f", staleness {self.staleness}" if self.staleness else ""
        near = f", at most {100 * self.bound:.2g} % from the best" if self.bound else ""
        count = len(self.devices)
        devices = "1 device" if count == 1 else f"{count} devices"
        head = f"{self.kind} plan: {devices}, batch {self.batch}"
        return f"{head}{time}{lag}{near}\n{draw(self.root, 1)}"

    def placements(self) -> dict[str, Placement]:
        """Devices, chunk and lock of every component, by name.

        Raises:
            PlanError: the tree takes more devices than the plan has.
        """
        found = list(spans(self.root, {}))
        pools = {leaf.device_type: self._pool(leaf.device_type) for leaf, _, _ in found}
        placed = []
        for leaf, parts, first in found:
            names = pools[leaf.device_type][first : first + leaf.devices]
            placed.append((leaf, parts, names, set(names)))
        return {
            leaf.component: Placement(
                component=leaf.component,
                devices=names,
                chunk=-(-self.batch // parts) if parts is not None and parts > 1 else None,
                shared=any(
                    not owned.isdisjoint(others)
                    for k, (_, _, _, others) in enumerate(placed)
                    if k != position
                ),
                position=position,
            )
            for position, (leaf, parts, names, owned) in enumerate(placed)
        }

    def _pool(self, kind: str) -> tuple[str, ...]:
        if not kind:
            return self.devices
        return tuple(name for name in self.devices if name.rpartition(":")[0] == kind)

    def _check_devices(self) -> None:
        owned: dict[str, int] = {}
        for leaf, _, first in spans(self.root, {}):
            kind = leaf.device_type
            if kind not in owned:
                owned[kind] = len(self._pool(kind))
            if first + leaf.devices > owned[kind]:
                of = f" of type {kind!r}" if kind else ""
                needed = f"needs devices {first} to {first + leaf.devices - 1}{of}"
                raise PlanError(leaf.component, f"{needed}, the plan has {owned[kind]}")

    def to_dict(self) -> PlainData:
        """Plain data for YAML or JSON."""
        data: dict[str, object] = {
            "format": FORMAT,
            "batch": self.batch,
            "devices": plain_devices(self.devices),
            "seconds": self.seconds,
        }
        if self.staleness:
            data["staleness"] = self.staleness
        if self.bound:
            data["bound"] = self.bound
        return {**data, "tree": plain_tree(self.root)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Plan":
        """The plan that :meth:`to_dict` wrote.

        Raises:
            PlanError: names the path and the reason.
        """
        return _read(Node(data, "", PlanError))

    def save(self, path: str | Path) -> None:
        """Write YAML, or JSON where the name ends in ``.json``."""
        document.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read what :meth:`save` wrote.

        Raises:
            PlanError: names the file, the path in it and the reason.
        """
        return _read(document.load(path, PlanError))


def device_names(devices: DeviceNames) -> tuple[str, ...]:
    """Check names, or make some up for a number of devices.

    Raises:
        PlanError: no devices, or a name twice.
    """
    if isinstance(devices, str):
        raise PlanError("devices", f"expected names or a number, found the text {devices!r}")
    names = tuple(f"device:{i}" for i in range(devices)) if isinstance(devices, int) else devices
    names = tuple(names)
    if not names:
        raise PlanError("devices", "a plan needs at least one device")
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise PlanError("devices", f"names repeat: {', '.join(repeated)}")
    return names


def plain_devices(names: Sequence[str]) -> object:
    """Device names for a document: counts by type where many are numbered from 0."""
    counts = Counter(name.rpartition(":")[0] for name in names)
    numbered = tuple(f"{kind}:{i}" for kind, count in counts.items() for i in range(count))
    return dict(counts) if len(names) > LISTED and numbered == tuple(names) else list(names)


def read_devices(node: Node) -> tuple[str, ...]:
    """Device names from a list of them, from counts by type, or from a number."""
    if isinstance(node.value, list):
        return device_names([item.text() for item in node.items()])
    if isinstance(node.value, Mapping):
        counts = {k: entry.integer(1, MOST_DEVICES) for k, entry in node.entries().items()}
        if not counts:
            node.fail("a plan needs at least one device")
        return tuple(f"{kind}:{i}" for kind, count in counts.items() for i in range(count))
    return device_names(node.integer(1, MOST_DEVICES))


def temporal_plan(graph: FlowGraph, devices: DeviceNames, batch: int) -> Plan:
    """Every component in turn on all devices; needs no profile.

    Raises:
        InfeasibleError: a component has no valid size that small.
    """
    names = device_names(devices)
    leaves = [Leaf(name, _fit(graph[name], len(names))) for name in graph.order()]
    root: Tree | None = None
    for part in reversed(_with_loops(graph, leaves, 1)):
        root = part if root is None else Temporal(part, root)
    assert root is not None
    return Plan(root, names, batch)


def spatial_plan(graph: FlowGraph, devices: DeviceNames, batch: int, micro_batches: int) -> Plan:
    """Every component on devices of its own, in equal shares; needs no profile.

    The members of a cycle alternate between two halves of the batch.

    Raises:
        InfeasibleError: fewer devices than the components need, or a component which cannot
            work on a part of the batch.
    """
    names = device_names(devices)
    order = [graph[name] for name in graph.order()]
    whole = [component.name for component in order if not component.chunked]
    if whole and micro_batches > 1:
        raise InfeasibleError((f"{', '.join(whole)} cannot work on a part of the batch",))
    shares = _shares(order, len(names))
    leaves = [Leaf(c.name, share) for c, share in zip(order, shares, strict=True)]
    root: Tree | None = None
    for part in reversed(_with_loops(graph, leaves, 2)):
        root = part if root is None else Spatial(part, root, micro_batches)
    assert root is not None
    return Plan(root, names, batch)


def _with_loops(graph: FlowGraph, leaves: Sequence[Leaf], parts: int) -> list[Leaf | Loop]:
    """The leaves in their order, those of a cycle as a loop; nobody has counted its rounds."""
    cycle_of = {name: cycle for cycle in graph.cycles() for name in cycle}
    found: list[Leaf | Loop] = []
    for cycle, group in itertools.groupby(leaves, lambda leaf: cycle_of.get(leaf.component)):
        members = tuple(group)
        found += members if cycle is None else [Loop(members, 1, parts)]
    return found


def _shares(order: Sequence[Component], devices: int) -> list[int]:
    least = [min(component.sizes, default=1) for component in order]
    if sum(least) > devices:
        parts = " + ".join(f"{c.name} {n}" for c, n in zip(order, least, strict=True))
        raise InfeasibleError((f"side by side: {parts} = {sum(least)} devices, have {devices}",))
    shares = least
    while True:
        free = devices - sum(shares)
        grown = [
            min((s for s in c.sizes if s > n), default=0) if c.sizes else n + 1
            for c, n in zip(order, shares, strict=True)
        ]
        able = [i for i, n in enumerate(grown) if 0 < n - shares[i] <= free]
        if not able:
            return shares
        poorest = min(able, key=lambda i: (grown[i], i))
        shares = [*shares[:poorest], grown[poorest], *shares[poorest + 1 :]]


def _fit(component: Component, devices: int) -> int:
    size = component.fits(devices)
    if not size:
        least = min(component.sizes)
        raise InfeasibleError((f"{component.name} needs {least} devices, have {devices}",))
    return size


def kind_of(tree: Tree) -> Kind:
    """Which of the four kinds of execution a tree is."""
    found: set[Kind] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Loop):
            found.add("spatial" if node.parts > 1 else "temporal")
        elif isinstance(node, Temporal | Spatial | Parallel):
            found.add("temporal" if isinstance(node, Temporal) else "spatial")
            waiting += [node.first, node.second]
    if len(found) > 1:
        return "hybrid"
    return found.pop() if found else "single"


def _read(node: Node) -> Plan:
    fields = node.fields(("batch", "devices", "tree"), ("format", "seconds", "staleness", "bound"))
    if "format" in fields and fields["format"].value != FORMAT:
        fields["format"].fail(f"expected {FORMAT!r}, found {fields['format'].value!r}")
    try:
        return Plan(
            root=read_tree(fields["tree"]),
            devices=read_devices(fields["devices"]),
            batch=fields["batch"].integer(1),
            seconds=fields["seconds"].number() if "seconds" in fields else None,
            staleness=fields["staleness"].integer() if "staleness" in fields else 0,
            bound=fields["bound"].number() if "bound" in fields else 0.0,
        )
    except PlanError as problem:
        if problem.source or not node.source:
            raise
        raise PlanError(problem.path, problem.reason, node.source) from problem

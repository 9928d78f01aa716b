"""A workflow with everything known about it, as one YAML or JSON document.

.. code-block:: yaml

    batch: 512
    devices: 64                     # or names, or counts by type: {h100: 32, l40: 32}
    node_devices: 8                 # optional, of one node
    cores: 192                      # optional
    memory_bytes: 80.0e+9           # of a device; or by type
    staleness: 0
    components:
      rollout:
        sizes: [8, 16, 32, 64]
        times: [{devices: 64, batch: 512, seconds: 591.3}]
        emission: [0.1, 0.25, 1.0]
      train: {sizes: [8, 16, 32], times: [[64, 512, 367.7]]}
    edges: [[rollout, train]]       # without edges: a chain in the order given

The shipped ``schema/workflow.json`` says the same to an editor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.sched import document
from rlinf.sched.document import Node, PlainData
from rlinf.sched.errors import GraphError, ProfileError
from rlinf.sched.graph import Component, FlowGraph
from rlinf.sched.plan import device_names, plain_devices, read_devices
from rlinf.sched.profile import ComponentProfile, Profile, Sample

SCHEMA = Path(__file__).parent / "schema" / "workflow.json"
"""JSON schema of the document."""

TOP = ("devices", "node_devices", "edges", "cores", "memory_bytes", "sync_s", "rounds", "staleness")
ENTRY = (
    "sizes",
    "chunked",
    "node_local",
    "overhead_s",
    "emission",
    "active_bytes",
    "resident_bytes",
    "onload_s",
    "offload_s",
    "cores",
)
Curve = tuple[float, ...]
NUMBERS = ENTRY[3:4] + ENTRY[5:]


@dataclass(frozen=True, slots=True)
class Workflow:
    """What a planner needs to know.

    Attributes:
        devices: names, each ``type:index``.
        batch: items an iteration.
        staleness: iterations the weights used upstream may lag behind.
    """

    graph: FlowGraph
    profile: Profile
    devices: tuple[str, ...]
    batch: int
    staleness: int = 0

    @classmethod
    def load(cls, path: str | Path) -> "Workflow":
        """Read a YAML or JSON file.

        Raises:
            ProfileError: names the file, the path in it and the reason.
        """
        return read(document.load(path, ProfileError))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Workflow":
        """Read plain data.

        Raises:
            ProfileError: names the path and the reason.
        """
        return read(Node(data, "", ProfileError))

    def on(self, devices: int) -> "Workflow":
        """The same workflow on another number of devices of its first type."""
        kind = self.devices[0].rpartition(":")[0]
        return replace(self, devices=tuple(f"{kind}:{i}" for i in range(devices)))

    def save(self, path: str | Path) -> None:
        """Write what :meth:`load` reads."""
        document.save(self.to_dict(), path)

    def to_dict(self) -> PlainData:
        """Plain data for YAML or JSON; times given as a law cannot be written."""
        profile = self.profile
        data: dict[str, object] = {"batch": self.batch, "devices": plain_devices(self.devices)}
        for key in ("node_devices", "cores", "sync_s"):
            if getattr(profile, key):
                data[key] = getattr(profile, key)
        for name, table in (("memory_bytes", profile.memory_bytes), ("rounds", profile.rounds)):
            if table:
                plain = dict(table)
                data[name] = plain[""] if set(plain) == {""} else plain
        if self.staleness:
            data["staleness"] = self.staleness
        names = dict.fromkeys([*self.graph.names, *profile.components])
        data["components"] = {name: self._entry(name) for name in names}
        return {**data, "edges": [list(edge) for edge in self.graph.edges]}

    def _entry(self, name: str) -> PlainData:
        entry = self.profile.components.get(name)
        data: dict[str, object] = {}
        if name in self.graph.names:
            component = self.graph[name]
            data |= {"sizes": list(component.sizes)} if component.sizes else {}
            data |= {} if component.chunked else {"chunked": False}
            data |= {"node_local": True} if component.node_local else {}
        if entry is None:
            return data
        if entry.law is not None:
            raise ProfileError(f"components.{name}", "its times are a function, not samples")
        data["times"] = [_plain_sample(sample) for sample in entry.samples]
        data |= {"emission": list(entry.emission)} if entry.emission else {}
        data |= {"emission": {n: list(q) for n, q in entry.emissions}} if entry.emissions else {}
        return data | {key: v for key in NUMBERS if (v := getattr(entry, key))}


def read(node: Node) -> Workflow:
    """A workflow from a document."""
    fields = node.fields(("batch", "components"), TOP)
    entries = fields["components"].entries()
    if not entries:
        fields["components"].fail("a workflow needs at least one component")
    rounds = (
        {name: count.integer(1) for name, count in fields["rounds"].entries().items()}
        if "rounds" in fields
        else {}
    )
    profile = Profile(
        {name: _read_profile(entry) for name, entry in entries.items() if _has_times(entry)},
        _read_memory(fields["memory_bytes"]) if "memory_bytes" in fields else {},
        fields["cores"].number() if "cores" in fields else 0.0,
        fields["sync_s"].number() if "sync_s" in fields else 0.0,
        rounds,
        fields["node_devices"].integer(1) if "node_devices" in fields else 0,
    )
    nodes = tuple(_read_component(n, e) for n, e in entries.items() if "+" not in n)
    graph = _read_graph(nodes, fields, node)
    _check(graph, profile, node)
    cycles = ["+".join(cycle) for cycle in graph.cycles()]
    for name, entry in fields["rounds"].entries().items() if "rounds" in fields else ():
        if name not in cycles:
            entry.fail(f"no such cycle; cycles: {', '.join(cycles) or 'none'}")
    return Workflow(
        graph,
        profile,
        read_devices(fields["devices"]) if "devices" in fields else device_names(1),
        fields["batch"].integer(1),
        fields["staleness"].integer() if "staleness" in fields else 0,
    )


def _has_times(entry: Node) -> bool:
    return isinstance(entry.value, Mapping) and "times" in entry.value


def _read_graph(nodes: tuple[Component, ...], fields: dict[str, Node], node: Node) -> FlowGraph:
    try:
        if "edges" not in fields:
            return FlowGraph.chain(*nodes)
        edges = []
        for edge in fields["edges"].items():
            ends = edge.items()
            if len(ends) != 2:
                edge.fail(f"an edge is [producer, consumer], found {len(ends)} names")
            edges.append((ends[0].text(), ends[1].text()))
        return FlowGraph(nodes, tuple(edges))
    except GraphError as problem:
        raise ProfileError("edges", str(problem), node.source) from problem


def _check(graph: FlowGraph, profile: Profile, node: Node) -> None:
    cycles = {member: "+".join(cycle) for cycle in graph.cycles() for member in cycle}
    for name in graph.names:
        if name not in profile.components and cycles.get(name) not in profile.components:
            raise ProfileError(f"components.{name}", "missing key 'times'", node.source)
    for name in profile.components:
        if "+" in name and name not in cycles.values():
            known = ", ".join(dict.fromkeys(cycles.values())) or "none"
            reason = f"no such cycle; cycles: {known}"
            raise ProfileError(f"components.{name}", reason, node.source)


def _read_component(name: str, entry: Node) -> Component:
    fields = entry.fields((), ("times", *ENTRY))
    sizes = tuple(size.integer(1) for size in fields["sizes"].items()) if "sizes" in fields else ()
    chunked = fields["chunked"].flag() if "chunked" in fields else True
    try:
        local = fields["node_local"].flag() if "node_local" in fields else False
        return Component(name, sizes, chunked, local)
    except GraphError as problem:
        entry.fail(str(problem))


def _read_profile(entry: Node) -> ComponentProfile:
    fields = entry.fields(("times",), ENTRY)

    def number(key: str) -> float:
        return fields[key].number() if key in fields else 0.0

    curve, curves = _read_emission(fields["emission"]) if "emission" in fields else ((), ())
    samples = tuple(_read_sample(sample) for sample in fields["times"].items())
    try:
        return ComponentProfile(
            samples,
            overhead_s=number("overhead_s"),
            emission=curve,
            emissions=curves,
            active_bytes=number("active_bytes"),
            resident_bytes=number("resident_bytes"),
            onload_s=number("onload_s"),
            offload_s=number("offload_s"),
            cores=number("cores"),
        )
    except ProfileError as problem:
        entry.child(None, problem.path).fail(problem.reason)


def _read_emission(node: Node) -> tuple[Curve, tuple[tuple[int, Curve], ...]]:
    if not isinstance(node.value, Mapping):
        return tuple(q.number() for q in node.items()), ()
    found = []
    for size, curve in node.entries().items():
        if not size.isdigit() or int(size) < 1:
            curve.fail(f"emission is a list, or lists by number of devices, found key {size!r}")
        found.append((int(size), tuple(q.number() for q in curve.items())))
    return (), tuple(found)


def _read_sample(node: Node) -> Sample:
    if isinstance(node.value, list):
        values = node.items()
        if len(values) != 3:
            node.fail(f"a short sample is [devices, batch, seconds], found {len(values)} values")
        return Sample(values[0].integer(1), _above(values[1]), _above(values[2]))
    fields = node.fields(("devices", "batch", "seconds"), ("device_type", "free_bytes"))
    return Sample(
        fields["devices"].integer(1),
        _above(fields["batch"]),
        _above(fields["seconds"]),
        fields["device_type"].text() if "device_type" in fields else "",
        fields["free_bytes"].number() if "free_bytes" in fields else 0.0,
    )


def _above(node: Node) -> float:
    value = node.number()
    if value <= 0:
        node.fail(f"must be above 0, is {value:g}")
    return value


def _read_memory(node: Node) -> dict[str, float]:
    if isinstance(node.value, Mapping):
        return {kind: _above(entry) for kind, entry in node.entries().items()}
    return {"": _above(node)}


def _plain_sample(sample: Sample) -> PlainData:
    data: dict[str, object] = {
        "devices": sample.devices,
        "batch": sample.batch,
        "seconds": sample.seconds,
    }
    data |= {"device_type": sample.device_type} if sample.device_type else {}
    return data | ({"free_bytes": sample.free_bytes} if sample.free_bytes else {})

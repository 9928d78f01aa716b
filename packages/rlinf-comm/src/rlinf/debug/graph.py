"""The connections of all workers of a registry, as data and drawn."""

from dataclasses import dataclass

from rlinf.comm.address import WorkerId
from rlinf.comm.endpoint import STATISTICS, Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.registry import WorkerRecord


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    """A connection between two workers, named in order.

    Attributes:
        one: The smaller id.
        other: The larger id.
        transport: What carries it.
    """

    one: WorkerId
    other: WorkerId
    transport: str


@dataclass(frozen=True, slots=True)
class ConnectionGraph:
    """What is connected at one moment.

    Attributes:
        workers: Everybody in the registry, ordered by id.
        connections: Ordered; those to whoever looked are left out.
        silent: Workers that did not answer, and why.
    """

    workers: tuple[WorkerRecord, ...]
    connections: tuple[Connection, ...]
    silent: tuple[tuple[WorkerId, str], ...]


def connection_graph(endpoint: Endpoint, timeout_s: float = 5.0) -> ConnectionGraph:
    """Ask every worker of the endpoint's registry for its connections; at the user's side.

    Connects the endpoint to all of them. A worker that does not answer within `timeout_s` is
    listed as silent.
    """
    workers = endpoint.registry.members()
    asked = [
        (worker.id, endpoint.call(STATISTICS, None, to=worker.id, timeout=timeout_s))
        for worker in workers
        if worker.id != endpoint.id
    ]
    found: set[Connection] = set()
    silent: list[tuple[WorkerId, str]] = []
    for id, handle in asked:
        try:
            connections = handle.result()["connections"]
        except CommError as error:
            silent.append((id, str(error)))
            continue
        for name, transport in connections.items():
            other = WorkerId.parse(name)
            if other not in (endpoint.id, id):
                found.add(Connection(min(id, other), max(id, other), transport))
    return ConnectionGraph(tuple(workers), tuple(sorted(found)), tuple(silent))


def visualize_connection_graph(graph: ConnectionGraph, form: str = "text") -> str:
    """Draw a graph: "text" for a terminal, "dot" for Graphviz.

    Raises:
        ValueError: The form is neither.
    """
    if form == "text":
        return _text(graph)
    if form == "dot":
        return _dot(graph)
    raise ValueError(f"form {form!r} must be 'text' or 'dot'")


def _text(graph: ConnectionGraph) -> str:
    lines = []
    silent = dict(graph.silent)
    for worker in graph.workers:
        note = f"  silent: {silent[worker.id]}" if worker.id in silent else ""
        lines.append(f"{worker.id}  [{worker.device}, pid {worker.pid}]{note}")
        for edge in graph.connections:
            if worker.id in (edge.one, edge.other):
                other = edge.other if edge.one == worker.id else edge.one
                lines.append(f"  {edge.transport:>8} -- {other}")
    return "\n".join(lines)


def _dot(graph: ConnectionGraph) -> str:
    lines = ["graph connections {"]
    hosts = sorted({worker.host for worker in graph.workers})
    for number, host in enumerate(hosts):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f'    label="host {number}";')
        lines += [
            f'    "{worker.id}" [label="{worker.id}\\n{worker.device}"];'
            for worker in graph.workers
            if worker.host == host
        ]
        lines.append("  }")
    lines += [
        f'  "{edge.one}" -- "{edge.other}" [label="{edge.transport}"];'
        for edge in graph.connections
    ]
    return "\n".join([*lines, "}"])

"""The connections of all workers of a registry, as data."""

from dataclasses import dataclass
from typing import Any

from rlinf.comm.address import WorkerId
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.inspection import CONNECTIONS
from rlinf.comm.registry import WorkerRecord


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    """A connection between two workers, named in order.

    Attributes:
        one: The smaller id.
        other: The larger id.
        transport: What carries it; empty while there is none.
        because: Why that, as whoever dialled says.
        state: up, absent (closed for want of use, or lost), resolving, dialling or pausing.
        nbytes: Payload in both directions since both endpoints were made.
        waiting: Messages that cannot be sent yet, in both directions.
        latency_s: There and back of an empty call; None where nobody answered.
    """

    one: WorkerId
    other: WorkerId
    transport: str
    because: str = ""
    state: str = "up"
    nbytes: int = 0
    waiting: int = 0
    latency_s: float | None = None


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

    Connects the endpoint to all of them, and lets each measure the latency to those it is connected
    to. A worker that does not answer within `timeout_s` is listed as silent.
    """
    workers = endpoint.registry.members()
    asked = [
        (worker.id, endpoint.call(CONNECTIONS, None, to=worker.id, timeout=timeout_s))
        for worker in workers
        if worker.id != endpoint.id
    ]
    found: dict[tuple[WorkerId, WorkerId], Connection] = {}
    silent: list[tuple[WorkerId, str]] = []
    for id, handle in asked:
        try:
            views = handle.result()
        except CommError as error:
            silent.append((id, str(error)))
            continue
        for view in views:
            seen = _connection(id, view)
            if endpoint.id not in (seen.one, seen.other):
                pair = (seen.one, seen.other)
                found[pair] = _merged(found[pair], seen) if pair in found else seen
    return ConnectionGraph(tuple(workers), tuple(sorted(found.values())), tuple(silent))


def _connection(id: WorkerId, view: dict[str, Any]) -> Connection:
    other = WorkerId.parse(view["peer"])
    return Connection(
        min(id, other),
        max(id, other),
        view["transport"],
        view["because"],
        view["state"],
        view["sent_bytes"] + view["received_bytes"],
        view["waiting"],
        view["latency_s"],
    )


def _merged(a: Connection, b: Connection) -> Connection:
    """One connection from what its two ends say: the one that dialled knows why."""
    why = a if not a.because.endswith("the peer chose") and a.because else b
    up = a if a.state == "up" else b
    latencies = [x.latency_s for x in (a, b) if x.latency_s is not None]
    return Connection(
        a.one,
        a.other,
        up.transport,
        why.because,
        up.state,
        max(a.nbytes, b.nbytes),
        a.waiting + b.waiting,
        min(latencies, default=None),
    )

"""From what a program did to what a planner needs to know, and back. Pure functions of records.

A component of the workflow is a group that was launched without a placement. What feeds what is
read from the names of the channels; groups which are none of the planner's business (scoring by
rule, placed by hand) are left out, and what they connect is connected.
"""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlinf.sched import (
    Component,
    ComponentProfile,
    FlowGraph,
    Placement,
    Plan,
    Profile,
    Profiler,
    Record,
    Temporal,
    Workflow,
    predict,
)
from rlinf.sched.graph import cycle_name
from rlinf.sched.tree import Tree, leaves
from rlinf.workers.devices import is_core
from rlinf.workers.records import ChunkRecord

__all__ = [
    "Iteration",
    "Probe",
    "Program",
    "busy_s",
    "foreseen_s",
    "in_turn",
    "placed",
    "probes",
    "workflow",
]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the program.

    Attributes:
        seconds: From its begin to the next one's.
        records: Of every stage, in any order.
        placements: Where the components were.
        moved_s: Seconds it took to bring them there, before the iteration.
    """

    seconds: float
    records: tuple[ChunkRecord, ...]
    placements: Mapping[str, Placement]
    moved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """What an iteration showed of the program.

    Attributes:
        graph: The components, and which feeds which.
        batch: Items that enter an iteration.
        whole: Components which take what there is at once, whatever the plan: the program itself
            feeds them, and they pass on their outputs one by one as they get ready, so that those
            downstream can work meanwhile.
        rounds: Of each member of a ring, how often the batch came to the busiest one of them.
    """

    graph: FlowGraph
    batch: int
    whole: frozenset[str] = field(default_factory=frozenset)
    rounds: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, records: Iterable[ChunkRecord], ranks: Mapping[str, int], devices: int
    ) -> "Program":
        """Read it from an iteration in which every component took all of its input at once.

        Args:
            ranks: The components, and how many workers each has.
            devices: How many there are; a component takes a multiple of its workers.

        Raises:
            ValueError: None of the components did anything.
        """
        ordered = sorted(records, key=lambda record: record.start)
        seen = list(dict.fromkeys(r.group for r in ordered if r.group in ranks))
        if not seen:
            groups = ", ".join(ranks) or "none was launched without a placement"
            raise ValueError(f"no stage of a group that can be planned was called ({groups})")
        edges = _edges(ordered, ranks)
        sizes = {g: tuple(range(ranks[g], devices + 1, ranks[g])) for g in seen if ranks[g] > 1}
        components = tuple(Component(group, sizes.get(group, ())) for group in seen)
        graph = FlowGraph(components, tuple(edges))
        fed = {b for _, b in edges}
        batch = _entering(ordered, graph)
        rounds = {
            name: max(1, *(round(_items(ordered, member) / batch) for member in cycle))
            for cycle in graph.cycles()
            for name in cycle
        }
        streams = {r.group for r in ordered if len(set(r.emitted)) > 1}
        return cls(graph, batch, frozenset(streams.intersection(seen) - fed), rounds)


def _entering(records: Sequence[ChunkRecord], graph: FlowGraph) -> int:
    """Items that come to the components which no other one feeds, except those of their ring."""
    ring = {name: cycle for cycle in graph.cycles() for name in cycle}
    fed = {b for a, b in graph.edges if a not in ring.get(b, ())}
    made = {r.output for r in records if r.group in ring}
    firsts = [name for name in graph.names if name not in fed]
    return max([1, *(_items([r for r in records if r.input not in made], n) for n in firsts)])


def _items(records: Iterable[ChunkRecord], group: str) -> int:
    return sum(record.items_in for record in records if record.group == group)


def in_turn(groups: Sequence[str], devices: Sequence[str]) -> dict[str, Placement]:
    """Everybody on all devices, one after another: what needs no knowledge of the program."""
    everything = tuple(devices)
    shared = len(groups) > 1
    return {g: Placement(g, everything, None, shared, k) for k, g in enumerate(groups)}


def placed(plan: Plan, program: Program) -> dict[str, Placement]:
    """The plan's placements, with those in whole which the program wants so."""
    return {
        name: replace(place, chunk=None) if name in program.whole else place
        for name, place in plan.placements().items()
    }


@dataclass(frozen=True, slots=True)
class Probe:
    """Placements to run an iteration with, in order to learn what the components take there.

    Attributes:
        counts: What is measured counts; otherwise the iteration warms the next ones up.
    """

    placements: Mapping[str, Placement]
    counts: bool


def probes(program: Program, devices: Sequence[str], parts: int) -> list[Probe]:
    """Each component on all devices, on half of them, on a quarter ..., in whole and in chunks.

    What was run already, everything in turn on all devices, needs no warming up.

    Args:
        parts: The chunks are so small a part of the batch.
    """
    chunk = max(1, program.batch // parts)
    found: list[Probe] = []
    size = len(devices)
    while size:
        whole = _together(program, devices[:size])
        if whole is not None:
            chunked = {
                name: place if name in program.whole else replace(place, chunk=chunk)
                for name, place in whole.items()
            }
            found += [Probe(whole, counts=False)] if size < len(devices) else []
            found += [Probe(whole, counts=True)]
            found += [Probe(chunked, counts=True)] if chunked != whole else []
        size //= 2
    return found


def _together(program: Program, devices: Sequence[str]) -> dict[str, Placement] | None:
    """Everybody on these devices, or as many of them as it can use; None where one can use none."""
    graph = program.graph
    fitting = {name: graph[name].fits(len(devices)) for name in graph.order()}
    if not all(fitting.values()):
        return None
    return {
        name: Placement(name, tuple(devices[:size]), None, True, position)
        for position, (name, size) in enumerate(fitting.items())
    }


def workflow(
    program: Program, iterations: Sequence[Iteration], devices: Sequence[str], cores: int = 0
) -> Workflow:
    """The program, with everything that measured iterations say about it.

    Args:
        cores: Processor cores beside the devices, a second resource; of no account where the
            devices are cores.
    """
    beside_devices = cores if not any(map(is_core, devices)) else 0
    profiler = Profiler()
    for iteration in iterations:
        for name in program.graph.names:
            profiler.record(_measured(name, iteration, program))
    profile = profiler.profile()
    components = {
        name: _with_needs(entry, [r for i in iterations for r in _of(name, i)], beside_devices)
        for name, entry in profile.components.items()
    }
    beside = [
        iteration.seconds - sum(_occupied_s(name, iteration) for name in components)
        for iteration in iterations
        if all(place.chunk is None for place in iteration.placements.values())
    ]
    sync_s = max(0.0, statistics.median(beside)) if beside else 0.0
    rounds = {cycle_name(cycle): program.rounds[cycle[0]] for cycle in program.graph.cycles()}
    known = Profile(components, cores=beside_devices, sync_s=sync_s, rounds=rounds)
    return Workflow(program.graph, known, tuple(devices), program.batch)


def foreseen_s(known: Workflow, plan: Plan) -> float:
    """Seconds of an iteration with this plan, one of many.

    Those that take turns each load and free once in it: devices change hands also between the last
    of them and the first of the next iteration, which the price of one iteration alone leaves out.
    """
    seconds = predict(known, plan).seconds
    turns, switches_s = _turns(plan.root)
    if len(turns) == 1:
        return seconds
    for turn in turns:
        entries = [known.profile[leaf.component] for leaf in leaves(turn)]
        seconds += max(e.onload_s for e in entries) + max(e.offload_s for e in entries)
    return seconds - switches_s


def _turns(tree: Tree) -> tuple[list[Tree], float]:
    """The parts that take turns, and the seconds of the switches between them."""
    if not isinstance(tree, Temporal) or tree.resident:
        return [tree], 0.0
    (first, a), (second, b) = _turns(tree.first), _turns(tree.second)
    return [*first, *second], a + b + tree.switch_s


def busy_s(group: str, iteration: Iteration) -> float:
    """Seconds a component was busy, on the rank that was longest; 0 where it did nothing."""
    return _longest((record.worker, record.busy_s) for record in _of(group, iteration))


def _of(group: str, iteration: Iteration) -> list[ChunkRecord]:
    return [record for record in iteration.records if record.group == group]


def _occupied_s(group: str, iteration: Iteration) -> float:
    """The same, loading and freeing included."""
    return _longest(
        (record.worker, record.busy_s + record.onload_s + record.offload_s)
        for record in _of(group, iteration)
    )


def _longest(spent: Iterable[tuple[str, float]]) -> float:
    by_rank: dict[str, float] = {}
    for worker, seconds in spent:
        by_rank[worker] = by_rank.get(worker, 0.0) + seconds
    return max(by_rank.values(), default=0.0)


def _take_s(chunks: Sequence[ChunkRecord]) -> float:
    """What it takes to be given a chunk that is there; 0 where only one was taken.

    While everybody takes turns, those after the first are there as a rule.
    """
    first = {record.worker: record.start for record in reversed(chunks)}
    later = [record.waited_s for record in chunks if record.start > first[record.worker]]
    return min(later, default=0.0)


def _measured(group: str, iteration: Iteration, program: Program) -> Record:
    """A run as the profiler wants it: a whole iteration, or the mean chunk.

    Ranks work side by side, so that of r ranks with chunks of k items takes as long as one chunk
    of r k items. What a stage does after its last chunk is shared out among its chunks. In a ring
    a run is one round of the batch, or of a chunk.
    """
    records, batch = _of(group, iteration), program.batch
    chunks = [record for record in records if record.items_in]
    place = iteration.placements[group]
    streamed: tuple[float, ...] = ()
    start = min(record.start for record in records)
    side_by_side = len({record.worker for record in chunks})
    if group in program.rounds:
        items = float(min(batch, (place.chunk or batch) * side_by_side))
        seconds = busy_s(group, iteration) / program.rounds[group] * items / batch
    elif place.chunk is None:
        times = sorted(time - start for record in chunks for time in record.emitted)
        streamed = tuple(times) if len(set(times)) > 1 else ()
        items, seconds = float(batch), busy_s(group, iteration)
    else:
        items = batch * side_by_side / len(chunks)
        seconds = sum(record.busy_s for record in records) / len(chunks) + _take_s(chunks)
    return Record(group, len(place.devices), items, start, max(seconds, 1e-9), streamed)


def _with_needs(
    component: ComponentProfile, records: Sequence[ChunkRecord], cores: int
) -> ComponentProfile:
    """With its memory, the times to switch it, and, of so many, the cores it keeps busy."""
    worked = sum(record.seconds * max(1, record.devices) for record in records)
    busy = sum(record.cpu_s for record in records) / max(worked, 1e-9)
    return replace(
        component,
        cores=min(busy, cores),
        onload_s=statistics.fmean(record.onload_s for record in records),
        offload_s=statistics.fmean(record.offload_s for record in records),
        active_bytes=float(max(record.resident_bytes for record in records)),
    )


def _edges(records: Sequence[ChunkRecord], ranks: Collection[str]) -> list[tuple[str, str]]:
    makers = {(r.output, r.group) for r in records if r.output}
    takers = {(r.input, r.group) for r in records}
    edges = {(a, b) for name, a in makers for other, b in takers if name == other}
    for group in {name for edge in edges for name in edge}.difference(ranks):
        before = {a for a, b in edges if b == group} - {group}
        after = {b for a, b in edges if a == group} - {group}
        edges = {e for e in edges if group not in e} | {(a, b) for a in before for b in after}
    return sorted((a, b) for a, b in edges if a != b)

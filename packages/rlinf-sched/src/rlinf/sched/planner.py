"""The door: from a workflow and a profile to a plan."""

from collections.abc import Sequence

import numpy as np

from rlinf.sched import compose
from rlinf.sched.algebra import Labels
from rlinf.sched.config import SearchConfig
from rlinf.sched.cost import CostModel
from rlinf.sched.cuts import Task
from rlinf.sched.evaluate import evaluate
from rlinf.sched.front import Front, Origin, join, prune
from rlinf.sched.graph import FlowGraph
from rlinf.sched.limits import raised
from rlinf.sched.machine import Machine
from rlinf.sched.packing import Packing, lower_bound, pack
from rlinf.sched.pairing import side_by_side
from rlinf.sched.plan import DeviceNames, Plan, kind_of
from rlinf.sched.polish import polish
from rlinf.sched.profile import Profile
from rlinf.sched.searcher import Searcher
from rlinf.sched.tree import Parallel, Spatial, Temporal, Tree

COARSE = 7
"""Options a component has in the first, coarse pass, which finds the ceiling for the second."""

MANY = 24
"""Options of a component from which on a coarse pass pays."""

CANDIDATES = 300
"""Plans of a workflow that is no chain which are laid out in time before the best is taken."""


HYBRIDS = 3000
"""Plans among which hybrids are looked for when those are asked for."""


def search(
    graph: FlowGraph,
    profile: Profile,
    devices: DeviceNames,
    batch: int,
    config: SearchConfig | None = None,
    staleness: int = 0,
) -> Plan:
    """The quickest plan for an iteration of ``batch`` items.

    Exact for chains of up to ``exact_components`` + 1 components. For small other workflows the
    search prices some meetings of departures too high, so the best candidates are laid out in time
    and improved. For larger ones ``Plan.bound`` compares with all plans, each component in a
    number of micro-batches of its own.

    Args:
        staleness: iterations which the weights used upstream may lag behind; with 1 or more,
            parts of the workflow may work on different iterations.

    Raises:
        InfeasibleError: nothing fits; it gives the arithmetic.
        GraphError: a component has no profile.
    """
    machine = Machine.of(devices, profile)
    model = CostModel(graph, profile, machine, batch)
    return search_model(model, config or SearchConfig(), staleness)


def search_model(model: CostModel, config: SearchConfig, staleness: int = 0) -> Plan:
    """As :func:`search`, for a workflow already priced."""
    narrow = len(model.names) > config.exact_components + model.chain
    packing = pack(model, config.micro_batches) if narrow else None
    least = lower_bound(model, packing, config.micro_batches) if narrow else 0.0

    def searched() -> tuple[Tree | None, float]:
        found = candidates(model, config, packing, staleness)
        if not found or staleness or config.kind or (model.chain and not found[0][1]):
            return found[0] if found else (None, np.inf)
        _, tree = polish([tree for tree, _ in found], model, config.micro_batches)
        return tree, found[0][1]

    tree, bound = None, np.inf
    if packing is not None and not staleness and np.isfinite(least):
        other = None if config.kind else lambda: searched()[0]
        least, tree = raised(model, packing, least, config.micro_batches, other)
    if tree is None or config.kind:
        tree, bound = searched()
    if tree is None:
        raise model.explain_infeasible()
    seconds = evaluate(tree, model, staleness).seconds
    if bound and least:
        bound = min(bound, max(0.0, seconds / least - 1))
    used = staleness if isinstance(tree, Parallel) else 0
    total = seconds + model.profile.sync_s
    return Plan(tree, model.machine.devices, model.batch, total, used, bound)


def candidates(
    model: CostModel, config: SearchConfig, packing: Packing | None = None, staleness: int = 0
) -> Sequence[tuple[Tree, float]]:
    """Plan trees, the most promising first, each with the bound of the search that found it."""
    everything = (1 << len(model.names)) - 1
    coarse: Front | None = None
    ceiling = np.inf
    guide = None if model.chain or packing is None else packing.promising
    if not staleness and _many(model):
        first = Searcher(model, config, sizes=COARSE, narrow=len(model.names) > 3, guide=guide)
        coarse = first.best()
        ceiling = min(first.ceiling, _quickest(coarse) * first.slack())
    narrow = len(model.names) > config.exact_components + model.chain
    searcher = Searcher(model, config, ceiling, narrow=narrow, guide=guide)
    if staleness:
        front = _overlapped(searcher, everything, staleness)
    else:
        front = searcher.best()
    front = front if len(front) or coarse is None else coarse
    ends = front.labels.x()
    order = np.argsort(ends, kind="stable")
    bound = np.inf if narrow else searcher.bound
    if config.kind == "hybrid":
        trees = (rebuild(front, int(row), None) for row in order[:HYBRIDS])
        return [(tree, np.inf) for tree in trees if kind_of(tree) == "hybrid"][:CANDIDATES]
    shortlist = order[: 1 if model.chain else CANDIDATES]
    return [(rebuild(front, int(row), None), bound) for row in shortlist]


def _many(model: CostModel) -> bool:
    return any(len(model.options(i, 1).seconds) > MANY for i in range(len(model.names)))


def _quickest(front: Front) -> float:
    return float(front.labels.x().min()) if len(front) else float("inf")


def _overlapped(searcher: Searcher, members: int, lag: int) -> Front:
    """Plans whose parts may work on ``lag`` different iterations, side by side."""
    alone = searcher.front(Task(members))
    if not lag:
        return alone
    found = [alone]
    for cut in searcher.cuts(members):
        first = searcher.front(Task(cut.first))
        second = _overlapped(searcher, cut.second, lag - 1)
        rows = side_by_side(first, second, searcher.model.machine.counts, last=False)
        end = np.maximum(first.labels.x()[rows[0]], second.labels.x()[rows[1]])
        labels = Labels(end[:, None], False, False, 1)
        found.append(compose.front_of(Origin("parallel", first, second), rows, labels))
    config = searcher.config
    width = len(searcher.model.machine.counts)
    return prune(join(found, alone.labels, width), config.front_limit, config.tolerance)


def rebuild(front: Front, row: int, inside: int | None) -> Tree:
    """The plan tree of one row of a front; ``inside``: micro-batches of the segment around it."""
    origin = front.origins[int(front.origin[row])]
    i, j = int(front.i[row]), int(front.j[row])
    if origin.op == "leaf":
        assert origin.options is not None
        stated = None if origin.parts == (inside or 1) else origin.parts
        return origin.options.leaf(i, stated)
    assert origin.first is not None
    if origin.op == "whole":
        return rebuild(origin.first, i, inside)
    assert origin.second is not None
    here = origin.parts if origin.op == "spatial" else inside
    first, second = rebuild(origin.first, i, here), rebuild(origin.second, j, here)
    if origin.op == "spatial":
        return Spatial(first, second, origin.parts)
    if origin.op == "parallel":
        return Parallel(first, second)
    return Temporal(first, second, origin.switch_s, origin.op == "resident")

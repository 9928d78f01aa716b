"""The sets of a workflow and their cuts as arrays: what trials of limits have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.sched.cost import CostModel, bits
from rlinf.sched.fit import Floats
from rlinf.sched.machine import Counts
from rlinf.sched.packing import Packing, numbers, units_of

NONE = -1


@dataclass(frozen=True, slots=True)
class Ways:
    """How one component may run; k ways.

    Attributes:
        number: which of the numbers of micro-batches; shape (k,).
        used: units of devices; shape (k,).
        run: seconds for the whole batch; shape (k,).
        step: least seconds until the first micro-batch is out, and for the last; shape (k,).
        option: which of the component's options; shape (k,).
    """

    number: Counts
    used: Counts
    run: Floats
    step: Floats
    option: Counts


@dataclass(frozen=True, slots=True)
class Layout:
    """Sets that cuts can leave, smaller ones first; the whole workflow is the last.

    Attributes:
        sets: bit masks.
        spans: least seconds of each packing; shape (sets, units + 1).
        cuts: by set, the numbers of both parts; shape (cuts, 2).
        switches: by set, least seconds between the parts of each cut in turn; shape (cuts,).
        feeding: by set, its components that feed others outside.
        fed: by set, its components fed from outside.
        column: place of a component among those that feed others, or NONE; (sets, components).
        row: the same among those fed.
        edges: producer and consumer of each edge that no other way implies; shape (edges, 2).
        numbers: of micro-batches, the first is 1.
        ways: by component.
    """

    sets: Sequence[int]
    spans: Floats
    cuts: Sequence[Counts]
    switches: Sequence[Floats]
    feeding: Sequence[list[int]]
    fed: Sequence[list[int]]
    column: Counts
    row: Counts
    edges: Counts
    numbers: Sequence[int]
    ways: Sequence[Ways]

    @classmethod
    def of(cls, model: CostModel, packing: Packing, micro_batches: Sequence[int] = ()) -> "Layout":
        """The sets of a packing; ``micro_batches``: the only numbers beside 1; empty: any."""
        sets = sorted(packing.spans, key=lambda s: (s.bit_count(), s))
        at = {s: k for k, s in enumerate(sets)}
        cuts, switches = [], []
        for s in sets:
            found = packing.cuts[s][0] if s in packing.cuts else ()
            pairs = [(at[cut.first], at[cut.second]) for cut in found]
            cuts.append(np.array(pairs, np.int64).reshape(-1, 2))
            free = model.tight or not model.switching
            between = [0.0 if free else model.switch(cut.first, cut.second) for cut in found]
            switches.append(np.array(between))
        fed = [[j for j in bits(s) if model.pred[j] & ~s] for s in sets]
        feeding = [[i for i in bits(s) if model.succ[i] & ~s] for s in sets]
        tried = [m for m in micro_batches or numbers(model.batch) if 1 < m <= model.batch]
        tried = [1, *sorted(set(tried))]
        everyone = range(len(model.names))
        edges = [(a, i) for i in everyone for a in bits(model.pred[i])]
        return cls(
            sets, np.stack([packing.spans[s] for s in sets]), cuts, switches, feeding, fed,
            _places(feeding, len(everyone)), _places(fed, len(everyone)),
            np.array(edges, np.int64).reshape(-1, 2), tried,
            [_ways(model, i, tried) for i in everyone],
        )  # fmt: skip

    @property
    def units(self) -> int:
        """Units of devices that there are."""
        return int(self.spans.shape[1]) - 1

    def shape(self, k: int) -> tuple[int, int]:
        """Rows and columns of the labels of a set."""
        return 1 + 2 * len(self.fed[k]), 1 + 2 * len(self.feeding[k])


def _places(members: Sequence[list[int]], count: int) -> Counts:
    found = np.full((len(members), count), NONE)
    for k, inside in enumerate(members):
        found[k, inside] = np.arange(len(inside))
    return found


def _ways(model: CostModel, i: int, tried: Sequence[int]) -> Ways:
    units, width = units_of(model)
    entry = model.own_profile(i)
    uneven = entry is not None and entry.uneven
    found = []
    for number, parts in enumerate(tried):
        if parts > 1 and not model.chunkable(i):
            continue
        options = model.options(i, parts)
        for k, (devices, one) in enumerate(zip(options.devices, options.seconds, strict=True)):
            run = one if options.loops else one * parts
            step = 0.0 if uneven and parts > 1 else run / parts
            found.append((number, min(int(devices) // width, units), run, step, k))
    table = np.array(found, float).reshape(-1, 5)
    whole = table.astype(np.int64)
    return Ways(whole[:, 0], whole[:, 1], table[:, 2], table[:, 3], whole[:, 4])

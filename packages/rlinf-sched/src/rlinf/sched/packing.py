"""Plans as packings of boxes: what no plan can beat, and which cuts are worth a look.

Without waiting for one another, components are boxes, so many devices wide and so many seconds
long. A plan cuts the rectangle of all devices and the whole iteration straight through, again and
again, until each box has its own: in turn the lengths add up, side by side the widths do. The
shortest rectangle, over all down-set cuts, is a lower bound on every plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.sched.cost import CostModel
from rlinf.sched.cuts import Cut, all_cuts
from rlinf.sched.fit import Floats

LEVELS = 64
"""Numbers of devices told apart; more devices are counted in larger units, rounded down."""

MOST_CUTS = 60_000
"""Beyond so many cuts no packing is looked for; ten independent components have 57,002."""

PROMISING = 600
"""About so many cuts are promising in all, and at least two of a set on each number of devices."""

STEPS = 60
"""Halvings of the interval in which a lower bound is looked for."""

FEW_SETS = 500
"""Up to so many sets, cuts are also chosen for a quarter of the devices."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The shortest packings of every set of components that a cut can leave.

    Attributes:
        spans: by set, the least seconds on 0, 1, ... units of devices.
        cuts: by set, its cuts with the least seconds of each; shape (cuts, units + 1).
    """

    spans: dict[int, Floats]
    cuts: dict[int, tuple[Sequence[Cut], Floats]]

    @property
    def seconds(self) -> float:
        """Seconds that no plan of the whole workflow can beat."""
        return float(self.spans[max(self.spans)][-1])

    def promising(self, members: int) -> Sequence[Cut]:
        """The cuts with the shortest packings: on all devices, on half and on a quarter of them."""
        cuts, each = self.cuts[members]
        last = each.shape[1] - 1
        looked_at = (last, last // 2, last // 4)[: 3 if len(self.cuts) <= FEW_SETS else 2]
        best = max(2, PROMISING // (2 * len(self.cuts)))
        ranks = [np.argsort(each[:, n], kind="stable")[:best] for n in looked_at]
        return [cuts[k] for k in np.unique(np.concatenate(ranks))]


def pack(model: CostModel, micro_batches: Sequence[int] = ()) -> Packing | None:
    """Packings of a workflow; None where it has too many cuts.

    Args:
        micro_batches: numbers of micro-batches to allow for beside the powers of two.
    """
    everything = (1 << len(model.names)) - 1
    cuts = _every_cut(model, everything)
    if cuts is None:
        return None
    units, width = units_of(model)
    spans = {}
    for i in range(len(model.names)):
        spans[1 << i] = leaf(run_times(model, i, micro_batches), units, width)
    each = {}
    for members in sorted(cuts, key=int.bit_count):
        found = cuts[members]
        lengths = _lengths(model, found, spans)
        each[members] = found, lengths
        spans[members] = lengths.min(axis=0)
    return Packing(spans, each)


def _every_cut(model: CostModel, everything: int) -> dict[int, Sequence[Cut]] | None:
    found: dict[int, Sequence[Cut]] = {}
    waiting, total = {everything}, 0
    while waiting:
        members = waiting.pop()
        if members & (members - 1) == 0:
            continue
        found[members] = tuple(all_cuts(model, members))
        total += len(found[members])
        if total > MOST_CUTS:
            return None
        parts = {part for cut in found[members] for part in (cut.first, cut.second)}
        waiting |= parts - found.keys()
    return found


def units_of(model: CostModel) -> tuple[int, int]:
    """How many units there are, and devices in one."""
    devices = int(model.machine.counts[: len(model.machine.types)].sum())
    width = -(-devices // LEVELS)
    return devices // width, width


def leaf(times: Sequence[tuple[Floats, Floats]], units: int, width: int) -> Floats:
    """Least seconds on 0, 1, ... units, of ways with so many devices and seconds each."""
    seconds = np.full(units + 1, np.inf)
    for devices, taken in times:
        at = np.minimum(devices.astype(np.int64) // width, units)
        np.minimum.at(seconds, at, taken)
    return np.minimum.accumulate(seconds)


def run_times(
    model: CostModel, i: int, micro_batches: Sequence[int] = ()
) -> Sequence[tuple[Floats, Floats]]:
    """Devices and seconds of every way to run a component, for each number of micro-batches."""
    most = model.batch if model.chunkable(i) else 1
    found = []
    for parts in numbers(most, micro_batches):
        options = model.options(i, parts)
        seconds = options.seconds * (1 if options.loops else parts)
        found.append((options.devices.astype(float), seconds))
    return found


def numbers(most: int, micro_batches: Sequence[int] = ()) -> Sequence[int]:
    """Numbers of micro-batches up to ``most``: powers of two and the given ones."""
    powers = {2**k for k in range(min(17, most.bit_length()))}
    return sorted(powers | {m for m in micro_batches if m <= most})


def _lengths(model: CostModel, cuts: Sequence[Cut], spans: dict[int, Floats]) -> Floats:
    """Least seconds of each cut on each number of units; shape (cuts, units + 1)."""
    first = np.stack([spans[cut.first] for cut in cuts])
    second = np.stack([spans[cut.second] for cut in cuts])
    units = first.shape[1] - 1
    switches = [0.0 if model.tight else model.switch(cut.first, cut.second) for cut in cuts]
    in_turn = first + second + np.array(switches)[:, None]
    # Row n of the windows holds the second part's seconds on n - k units, k = 0, 1, ...
    padded = np.pad(second[:, ::-1], ((0, 0), (0, units)), constant_values=np.inf)
    rest = np.lib.stride_tricks.sliding_window_view(padded, units + 1, axis=1)[:, ::-1]
    beside = np.maximum(first[:, None, :], rest).min(axis=2)
    return np.asarray(np.minimum.accumulate(np.minimum(in_turn, beside), axis=1))


def lower_bound(
    model: CostModel, packing: Packing | None, micro_batches: Sequence[int] = ()
) -> float:
    """Seconds below which no plan can lie.

    Three arguments: a component takes at least its quickest run; the devices are busy for at
    least the least device-seconds of every component, at a size at which it is quick enough; and
    the components must fit beside and after one another.
    """
    work = [_work(run_times(model, i, micro_batches)) for i in range(len(model.names))]
    if any(not len(seconds) for _, seconds in work):
        return float("inf")
    floor = max(float(seconds.min()) for _, seconds in work)
    devices = float(model.machine.counts[: len(model.machine.types)].sum())
    low, high = floor, max(floor, sum(float(s.max()) for _, s in work))
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _area(work, middle) > devices * middle:
            low = middle
        else:
            high = middle
    return max(low, packing.seconds if packing is not None else 0.0)


def _work(times: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    devices, seconds = zip(*times, strict=True)
    return np.concatenate(devices), np.concatenate(seconds)


def _area(work: list[tuple[Floats, Floats]], limit: float) -> float:
    total = 0.0
    for devices, seconds in work:
        able = seconds <= limit
        total += float((seconds[able] * devices[able]).min()) if able.any() else np.inf
    return total

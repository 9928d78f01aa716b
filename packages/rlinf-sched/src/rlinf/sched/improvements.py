"""What would make a traced flow quicker, and by how much: the trace is replayed with each change.

In the replay a chunk begins once what it had to wait for in the trace is there: its worker, the
output it took, the devices another gave back; or, where the program itself feeds it, the end of
what came before. The time that had passed since then in the trace passes again. Unchanged, the
replay takes exactly as long as the trace.
"""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf.sched.activities import Activity, length_s

WORTH = 0.005
"""Improvements of less than this share are not named."""
CLOSE_S = 1e-6
"""Times so close are the same: traces have microseconds."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A change and what it is expected to save, alone.

    Attributes:
        text: What to change.
        gain_s: Seconds an iteration.
        share: Of the time of the flow.
    """

    text: str
    gain_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in a replay.

    Attributes:
        work: Factor of the work of each chunk, by its index; 1 where there is none.
        loading: State is loaded and freed.
        turns: Devices are waited for.
        control: The program takes its time between what ends and what it feeds next.
    """

    work: Mapping[int, float] = field(default_factory=dict)
    loading: bool = True
    turns: bool = True
    control: bool = True


def improvements(found: Sequence[Activity], count: int = 3) -> tuple[Improvement, ...]:
    """The changes that save most, the best first; at most `count`."""
    if not found:
        return ()
    story = _Story(found)
    whole, rounds = story.seconds(Change()), len({one.iteration for one in found})
    listed = [
        Improvement(text, (whole - seconds) / rounds, 1 - seconds / whole if whole else 0.0)
        for text, seconds in ((text, story.seconds(change)) for text, change in _changes(found))
    ]
    worthy = [one for one in listed if one.share >= WORTH]
    return tuple(sorted(worthy, key=lambda one: -one.gain_s)[:count])


def _changes(found: Sequence[Activity]) -> Iterator[tuple[str, Change]]:
    for name in dict.fromkeys(one.name for one in found):
        half = {index: 0.5 for index, one in enumerate(found) if one.name == name}
        yield f"{name} twice as fast: less work, or twice the devices", Change(work=half)
    if any(one.locked_s > CLOSE_S for one in found):
        text = "no turns: stages side by side, at best, on devices of their own (plan=auto tries)"
        yield text, Change(turns=False)
    if any(one.load_s > CLOSE_S for one in found):
        yield "state stays on the devices: nothing is loaded and freed", Change(loading=False)
    yield (
        "nothing between stages: no weights, evaluation, checkpoints, messages",
        Change(control=False),
    )
    for group in dict.fromkeys(_group(one) for one in found):
        if even := _even(found, group):
            yield f"{group}: the same work for each of its workers", Change(work=even)


def _group(one: Activity) -> str:
    return one.worker.rpartition("/")[0]


def _even(found: Sequence[Activity], group: str) -> dict[int, float]:
    """Factors with which every worker of a group works as long as their mean, in each iteration."""
    totals: dict[int, dict[str, float]] = {}
    workers = dict.fromkeys(one.worker for one in found if _group(one) == group)
    for one in found:
        if one.worker in workers:
            of = totals.setdefault(one.iteration, dict.fromkeys(workers, 0.0))
            of[one.worker] += one.work_s
    if len(workers) < 2:
        return {}
    means = {iteration: statistics.fmean(of.values()) for iteration, of in totals.items()}
    return {
        index: means[one.iteration] / totals[one.iteration][one.worker]
        for index, one in enumerate(found)
        if one.worker in workers and totals[one.iteration][one.worker] > 0
    }


@dataclass(frozen=True, slots=True)
class _Need:
    """Something a chunk waited for: another chunk, up to so long after that began."""

    index: int
    after_s: float
    kind: str


class _Story:
    """What waited for what, found once; chunks in the order of their beginning."""

    def __init__(self, found: Sequence[Activity]) -> None:
        self._found = found
        self._by_end = sorted(range(len(found)), key=lambda index: found[index].end)
        self._ends = [found[index].end for index in self._by_end]
        self._emissions = _emissions(found)
        self._needs = [list(self._needs_of(index)) for index in range(len(found))]

    def seconds(self, change: Change) -> float:
        """How long the flow takes with this change."""
        begins: list[float] = []
        ends: list[float] = []
        for index, one in enumerate(self._found):
            needs, found = self._needs[index], self._found
            times = [found[need.index].begin + need.after_s for need in needs]
            gap = one.begin - max(times) if times else 0.0
            if not change.control:
                gap = 0.0
            later = [
                begins[need.index] + _scaled(found[need.index], need, change)
                for need in needs
                if change.turns or need.kind != "turn"
            ]
            begin = max(later) + gap if later else (one.begin if not needs else begins[0])
            begins.append(begin)
            load_s = one.load_s if change.loading else 0.0
            ends.append(begin + load_s + one.work_s * change.work.get(index, 1.0))
        return max(ends) - begins[0]

    def _needs_of(self, index: int) -> Iterator[_Need]:
        one = self._found[index]
        before = self._last(one.begin, index, lambda other: other.worker == one.worker)
        if before is not None:
            yield _Need(before, self._found[before].seconds, "worker")
        if one.input in self._emissions:
            times, producers = self._emissions[one.input]
            place = bisect_right(times, one.begin + CLOSE_S) - 1
            if place >= 0 and producers[place] < index:
                producer = producers[place]
                yield _Need(producer, times[place] - self._found[producer].begin, "items")
        else:
            earlier = self._last(one.begin, index, lambda o: o.iteration < one.iteration)
            if earlier is not None:
                yield _Need(earlier, self._found[earlier].seconds, "control")
        if one.locked_s > CLOSE_S:
            holder = self._last(one.begin, index, lambda other: other.worker != one.worker)
            if holder is not None:
                yield _Need(holder, self._found[holder].seconds, "turn")

    def _last(self, now: float, me: int, wanted: Callable[[Activity], bool]) -> int | None:
        """The last wanted chunk to end by now, of those that began before this one."""
        for place in range(bisect_right(self._ends, now + CLOSE_S) - 1, -1, -1):
            index = self._by_end[place]
            if index < me and wanted(self._found[index]):
                return index
        return None


def _emissions(found: Sequence[Activity]) -> dict[str, tuple[list[float], list[int]]]:
    """By channel: when outputs came, increasing, and from which chunk."""
    events: dict[str, list[tuple[float, int]]] = {}
    for index, one in enumerate(found):
        if one.output:
            events.setdefault(one.output, []).extend((time, index) for time in one.emitted)
    result = {}
    for channel, listed in events.items():
        listed.sort()
        result[channel] = ([time for time, _ in listed], [index for _, index in listed])
    return result


def _scaled(one: Activity, need: _Need, change: Change) -> float:
    """How long after its beginning a chunk gives what is needed, with the change."""
    inside, beyond = min(need.after_s, one.seconds), max(0.0, need.after_s - one.seconds)
    load_s = one.load_s if change.loading else 0.0
    seconds = load_s + one.work_s * change.work.get(need.index, 1.0)
    return inside * (seconds / one.seconds if one.seconds else 1.0) + beyond


def improvement_lines(found: Sequence[Activity]) -> list[str]:
    """The three biggest improvements, to read."""
    listed = improvements(found)
    if not listed:
        return []
    lines = [
        f"what would help, each alone (the trace of {length_s(found):.2f} s replayed with it):"
    ]
    for place, one in enumerate(listed, start=1):
        saving = f"-{one.gain_s:.3f} s an iteration ({100 * one.share:.0f} %)"
        lines.append(f"  {place}. {saving:36s} {one.text}")
    return lines

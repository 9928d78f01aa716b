"""What the workers of a traced flow did, chunk by chunk, and what each chunk had to wait for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlinf.sched.trace import Span

STAGE = "stage"
"""Kind of the spans that are chunks of a flow."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One chunk on one worker. Times are seconds on the trace's clock.

    Attributes:
        worker: Who.
        name: Of the stage, with its group.
        iteration: To which it belongs.
        begin: When it had its items and its devices.
        work_s: Of work.
        load_s: Of loading its state before that and freeing it afterwards.
        waited_s: For items, before it began.
        locked_s: For devices, before it began.
        input, output: Channels; empty: unknown or none.
        emitted: When its outputs were out, increasing.
    """

    worker: str
    name: str
    iteration: int
    begin: float
    work_s: float
    load_s: float
    waited_s: float
    locked_s: float
    input: str
    output: str
    emitted: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """In which it held its devices."""
        return self.work_s + self.load_s

    @property
    def end(self) -> float:
        """When it gave them back."""
        return self.begin + self.seconds


@dataclass(frozen=True, slots=True)
class Shares:
    """What a worker spent its time on, as parts of the time of the whole flow."""

    worker: str
    works: float
    loads: float
    waits_for_devices: float
    waits_for_items: float

    @property
    def idle(self) -> float:
        """The part in which it did not work."""
        return 1.0 - self.works


def activities(spans: Sequence[Span]) -> tuple[Activity, ...]:
    """The chunks of a trace, by their beginning; () where no flow was traced."""
    found = [_activity(span) for span in spans if span.kind == STAGE and span.worker]
    return tuple(sorted(found, key=lambda one: one.begin))


def _activity(span: Span) -> Activity:
    def text(key: str) -> str:
        return str(span.arguments.get(key, ""))

    def number(key: str) -> float:
        value = span.arguments.get(key)
        return float(value) if isinstance(value, int | float) else 0.0

    onload_s = number("onload_s")
    return Activity(
        worker=span.worker,
        name=span.name,
        iteration=int(number("iteration")),
        begin=span.start - onload_s,
        work_s=span.seconds,
        load_s=onload_s + number("offload_s"),
        waited_s=number("waited_s"),
        locked_s=number("locked_s"),
        input=text("input"),
        output=text("output"),
        emitted=tuple(span.start + offset for offset in span.emitted),
    )


def length_s(found: Sequence[Activity]) -> float:
    """Seconds from the first beginning to the last end."""
    return max(one.end for one in found) - min(one.begin for one in found)


def iterations_s(found: Sequence[Activity]) -> list[float]:
    """Seconds of each iteration, from the end of the one before; of the first from its beginning.

    Where iterations overlap, it is how often one ends.
    """
    ends: dict[int, float] = {}
    for one in found:
        ends[one.iteration] = max(ends.get(one.iteration, one.end), one.end)
    times = [found[0].begin, *(ends[number] for number in sorted(ends))]
    return [end - begin for begin, end in pairwise(times)]


def shares(found: Sequence[Activity]) -> tuple[Shares, ...]:
    """By worker, in the order in which they begin."""
    whole = length_s(found) or 1.0
    result = []
    for worker in dict.fromkeys(one.worker for one in found):
        mine = [one for one in found if one.worker == worker]
        sums = [
            sum(getattr(one, part) for one in mine) / whole
            for part in ("work_s", "load_s", "locked_s", "waited_s")
        ]
        result.append(Shares(worker, *sums))
    return tuple(result)

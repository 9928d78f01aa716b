"""A made-up world in which plans take as long as they should."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlinf.sched import Placement, Plan
from rlinf.workers import ChunkRecord, PlanningConfig
from rlinf.workers.course import Choice, Decision, course
from rlinf.workers.planning import Iteration

CORES = ("core:0", "core:1", "core:2", "core:3")
CHANNELS = {"rollout": ("prompts", "samples"), "reward": ("samples", "scored")}
CHANNELS["trainer"] = ("scored", "")


def record(
    group: str,
    *,
    items: int,
    seconds: float,
    start: float = 0.0,
    rank: int = 0,
    emitted: tuple[float, ...] | None = None,
    onload_s: float = 0.0,
) -> ChunkRecord:
    source, target = CHANNELS[group]
    end = start + seconds
    return ChunkRecord(
        worker=f"{group}/{rank}",
        stage="work" if items else "finish",
        iteration=1,
        input=source,
        output=target,
        start=start,
        end=end,
        seconds=seconds,
        waited_s=0.0,
        locked_s=0.0,
        onload_s=onload_s,
        offload_s=0.0,
        resident_bytes=100,
        items_in=items,
        items_out=items if target else 0,
        tokens=0,
        emitted=emitted if emitted is not None else (end,) * items,
    )


@dataclass
class World:
    """Groups with a cost of a call and of an item, which scale with the devices."""

    call_s: dict[str, float]
    item_s: dict[str, float]
    batch: int = 32
    scaling: float = 1.0
    streams: tuple[str, ...] = ()
    history: list[Mapping[str, Placement]] = field(default_factory=list)

    def chunk_s(self, group: str, devices: int, items: int) -> float:
        return float((self.call_s[group] + self.item_s[group] * items) / devices**self.scaling)

    def run(self, places: Mapping[str, Placement]) -> Iteration:
        """Take turns where devices are shared; otherwise the longest decides."""
        self.history.append(places)
        records: list[ChunkRecord] = []
        clock = 0.0
        for group in CHANNELS:
            if group not in places:
                records.append(record(group, items=self.batch, seconds=1e-6, start=clock))
                continue
            place, left, begin = places[group], self.batch, clock
            while left:
                items = min(left, place.chunk or left)
                seconds = self.chunk_s(group, len(place.devices), items)
                ends = (
                    tuple(clock + seconds * k / items for k in range(1, items + 1))
                    if group in self.streams
                    else None
                )
                records.append(
                    record(group, items=items, seconds=seconds, start=clock, emitted=ends)
                )
                clock, left = clock + seconds, left - items
            if not place.shared:
                clock = begin
        spent = {name: sum(r.seconds for r in records if r.group == name) for name in places}
        alone = [seconds for name, seconds in spent.items() if not places[name].shared]
        turns = sum(seconds for name, seconds in spent.items() if places[name].shared)
        return Iteration(max([turns, *alone]) + 0.01, tuple(records), places)


def follow(
    world: World,
    choice: str | Plan,
    iterations: int,
    config: PlanningConfig | None = None,
    change: Callable[[int], None] = lambda _: None,
    ranks: Mapping[str, int] | None = None,
    devices: tuple[str, ...] = CORES,
) -> list[Decision]:
    """Run the program for so many iterations as the course says."""
    wanted = ranks or dict.fromkeys(("trainer", "rollout"), 1)
    decisions = course(Choice.of(choice), config or PlanningConfig(), devices, wanted)
    decision = next(decisions)
    taken = [decision]
    places: Mapping[str, Placement] = {}
    for number in range(iterations):
        change(number)
        places = decision.placements or places
        decision = decisions.send(world.run(places))
        taken.append(decision)
    return taken


def plans(decisions: list[Decision]) -> list[Plan]:
    return [decision.plan for decision in decisions if decision.plan is not None]

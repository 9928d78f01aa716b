"""FlowPlanner: profiles a running program, plans it, and moves its groups, iteration by iteration.

    planner = FlowPlanner(cluster, "auto")
    for step in planner.steps(range(1, 101)):
        ...  # the program

Every iteration is a real one: nothing is repeated or thrown away while plans are looked for. The
decisions (`course`) are a function of what the iterations showed; this class carries them out.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from rlinf.sched import Placement, Plan
from rlinf.workers.cluster import Cluster
from rlinf.workers.course import Choice, Decision, PlanningConfig, course
from rlinf.workers.devices import local_cores, rank_devices, strays
from rlinf.workers.group import gather
from rlinf.workers.planning import Iteration
from rlinf.workers.records import ChunkRecord
from rlinf.workers.recovery import Attempt

__all__ = ["FlowPlanner"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class FlowPlanner:
    """Plans the groups of a cluster which were launched without a placement.

    Args:
        cluster: Its records are listened to from now on.
        choice: "temporal", "spatial", "auto", the path of a saved plan, or a plan.
        config: Of "auto".
        watch: Called with every decision once it was carried out, on the thread of the program.

    Raises:
        ConfigError: The choice is none of these, or no plan is in the file.
    """

    def __init__(
        self,
        cluster: Cluster,
        choice: str | Plan = "auto",
        config: PlanningConfig | None = None,
        watch: Callable[[Decision], None] = lambda _: None,
    ) -> None:
        self._cluster, self._watch = cluster, watch
        self._choice = Choice.of(choice)
        self._config = config or PlanningConfig()
        self._lock = threading.Lock()
        self._records: list[ChunkRecord] = []
        self._places: Mapping[str, Placement] = {}
        cluster.add_sink(self._take)

    def steps(self, steps: Iterable[T]) -> Iterator[T]:
        """Pass the steps on; between two of them, decide and move.

        All groups must have been launched. A step's iteration lasts until the next is asked for;
        that of an `Attempt` which failed does not count.

        Raises:
            ConfigError: A saved plan is for other groups.
            InfeasiblePlacement: It is for other devices.
        """
        groups = {name: len(g) for name, g in self._cluster.groups.items() if g.managed}
        devices, cores = self._cluster.devices, len(local_cores())
        decisions = course(self._choice, self._config, devices, groups, cores)
        decision = next(decisions)
        for step in steps:
            moved_s = self._carry_out(decision)
            self._drain()
            began = time.monotonic()
            yield step
            seconds = time.monotonic() - began
            if isinstance(step, Attempt) and step.failed:
                decision = replace(decision, placements=None)  # it tells nothing of the plan
                continue
            decision = decisions.send(self._iteration(seconds, moved_s))
        if decision.plan is not None:  # what the last iteration has shown is of use to the next run
            self._watch(decision)

    def _iteration(self, seconds: float, moved_s: float) -> Iteration:
        return Iteration(seconds, self._drain(), self._places, moved_s)

    def _carry_out(self, decision: Decision) -> float:
        """Move whoever has to; seconds it took."""
        if decision.placements is None:
            return 0.0
        began = time.monotonic()
        groups = self._cluster.groups
        moving = {n: p for n, p in decision.placements.items() if self._places.get(n) != p}
        moves = [groups[name].move(place, decision.batch) for name, place in moving.items()]
        arrived = gather(moves, f"moving {', '.join(moving)}").result(None)
        for (name, place), nodes in zip(moving.items(), arrived, strict=True):
            shares = rank_devices(name, len(groups[name]), place, self._cluster.devices)
            if apart := strays(shares, nodes):
                log.warning("group %s: %s", name, apart)
        self._places = decision.placements
        seconds = time.monotonic() - began
        log.info("%s; moved %s in %.3f s", decision.because, ", ".join(moving) or "nobody", seconds)
        kind = f"{decision.plan.kind} plan, " if decision.plan is not None else ""
        self._cluster.note("plan", f"{kind}{decision.because}")
        self._watch(decision)
        return seconds

    def _take(self, record: ChunkRecord) -> None:
        with self._lock:
            self._records.append(record)

    def _drain(self) -> tuple[ChunkRecord, ...]:
        with self._lock:
            taken, self._records = tuple(self._records), []
        return taken

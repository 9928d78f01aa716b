"""What a search is asked for a set of components."""

from dataclasses import dataclass

from rlinf.sched.compose import Wiring
from rlinf.sched.cuts import Cut


@dataclass(frozen=True, slots=True)
class Task:
    """A set of components, and those outside that its pipeline touches (bit masks).

    Attributes:
        takes: members fed by a pipelined neighbour.
        gives: members that feed one.
        parts: micro-batches of the segment.
        beside: components idle in the memory of the same devices.
        top: all resources are its own, and only its quickest plan matters.
    """

    members: int
    takes: int = 0
    gives: int = 0
    parts: int = 1
    beside: int = 0
    top: bool = False

    def part(self, members: int, fed: int, feeding: int) -> "Task":
        """A part of the set, with further neighbours within the set."""
        takes = (self.takes | fed) & members
        gives = (self.gives | feeding) & members
        return Task(members, takes, gives, self.parts, self.beside)


def wiring(task: Task, cut: Cut, edge: bool) -> Wiring:
    """Which sides of a cut have pipelined neighbours outside the set."""
    return Wiring(
        edge,
        bool(task.takes & cut.first),
        bool(task.takes & cut.second),
        bool(task.gives & cut.first),
        bool(task.gives & cut.second),
    )

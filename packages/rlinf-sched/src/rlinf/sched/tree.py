"""The nodes of a plan: what runs beside what, and what after what.

In every pair ``first`` feeds ``second``, or neither feeds the other; read from left to right the
leaves are in topological order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rlinf.sched.errors import PlanError

ANY_TYPE = ""
"""Device type of a leaf which takes whatever the plan has."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One component on some devices.

    Attributes:
        micro_batches: into how many parts it cuts the iteration's batch; None: as the innermost
            ``Spatial`` around it says, and one part where there is none.
        device_type: which type of device, where the plan has several.
        cores: processor cores it is given; 0: as many as it likes.
    """

    component: str
    devices: int
    micro_batches: int | None = None
    device_type: str = ANY_TYPE
    cores: int = 0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise PlanError(self.component, f"needs at least one device, has {self.devices}")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise PlanError(self.component, f"micro_batches must be positive: {self}")


@dataclass(frozen=True, slots=True)
class Temporal:
    """The same devices, ``second`` after ``first``.

    Attributes:
        switch_s: seconds between them; 0 where both stay in memory.
        resident: both stay in memory, nothing is offloaded.
    """

    first: "Tree"
    second: "Tree"
    switch_s: float = 0.0
    resident: bool = False


@dataclass(frozen=True, slots=True)
class Spatial:
    """Separate devices, pipelined in ``micro_batches`` parts."""

    first: "Tree"
    second: "Tree"
    micro_batches: int

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise PlanError("spatial", f"micro_batches must be positive, is {self.micro_batches}")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Separate devices, neither feeds the other."""

    first: "Tree"
    second: "Tree"


@dataclass(frozen=True, slots=True)
class Loop:
    """The members of a cycle, which hand the batch round ``rounds`` times.

    Attributes:
        parts: 1: the members take turns on the same devices. More: they have devices of their
            own and the batch goes round in this many parts, one a member at a time.
    """

    members: tuple[Leaf, ...]
    rounds: int
    parts: int = 1

    def __post_init__(self) -> None:
        if not self.members or self.rounds < 1 or self.parts < 1:
            raise PlanError("loop", "needs members, and at least one round and one part")


Tree: TypeAlias = Leaf | Temporal | Spatial | Parallel | Loop
Pair: TypeAlias = Temporal | Spatial | Parallel


def leaves(tree: Tree) -> Iterator[Leaf]:
    """The leaves from left to right, which is a topological order."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Loop):
        yield from tree.members
    else:
        yield from leaves(tree.first)
        yield from leaves(tree.second)


def loops(tree: Tree) -> Iterator[Loop]:
    """The loops from left to right."""
    if isinstance(tree, Loop):
        yield tree
    elif not isinstance(tree, Leaf):
        yield from loops(tree.first)
        yield from loops(tree.second)


def width(tree: Tree) -> Mapping[str, int]:
    """Devices that the tree takes, by device type."""
    if isinstance(tree, Leaf):
        return {tree.device_type: tree.devices}
    if isinstance(tree, Loop):
        parts = [width(member) for member in tree.members]
        together = tree.parts > 1
    else:
        parts = [width(tree.first), width(tree.second)]
        together = not isinstance(tree, Temporal)
    merge = sum if together else max
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: merge(part.get(kind, 0) for part in parts) for kind in kinds}


Span: TypeAlias = tuple[Leaf, int | None, int]
"""A leaf, the micro-batches it inherits, and its first device among those of its type."""


def spans(tree: Tree, offset: Mapping[str, int], inherited: int | None = None) -> Iterator[Span]:
    """Where every leaf lies, in topological order; members inherit a loop's parts."""
    if isinstance(tree, Leaf):
        parts = inherited if tree.micro_batches is None else tree.micro_batches
        yield tree, parts, offset.get(tree.device_type, 0)
        return
    if isinstance(tree, Loop):
        for member in tree.members:
            yield from spans(member, offset, tree.parts)
            if tree.parts > 1:
                offset = _after(offset, member)
        return
    if isinstance(tree, Spatial):
        inherited = tree.micro_batches
    yield from spans(tree.first, offset, inherited)
    after = offset if isinstance(tree, Temporal) else _after(offset, tree.first)
    yield from spans(tree.second, after, inherited)


def draw(tree: Tree, indent: int = 0) -> str:
    """An indented picture of the tree, one node a line."""
    pad = "  " * indent
    if isinstance(tree, Leaf):
        parts = f", {tree.micro_batches} micro-batches" if tree.micro_batches else ""
        kind = f" of {tree.device_type}" if tree.device_type else ""
        cores = f", {tree.cores} cores" if tree.cores else ""
        return f"{pad}{tree.component}: {_count(tree.devices)}{kind}{cores}{parts}"
    if isinstance(tree, Loop):
        head = f"{pad}loop: {tree.rounds} rounds, {tree.parts} part(s)"
        return "\n".join([head, *(draw(member, indent + 1) for member in tree.members)])
    head = f"{pad}{type(tree).__name__.lower()}"
    if isinstance(tree, Spatial):
        head += f": {tree.micro_batches} micro-batches"
    if isinstance(tree, Temporal) and (tree.switch_s or tree.resident):
        head += ": both stay in memory" if tree.resident else f": {tree.switch_s:g} s to switch"
    return "\n".join([head, draw(tree.first, indent + 1), draw(tree.second, indent + 1)])


def _count(devices: int) -> str:
    return f"{devices} device" + ("s" if devices != 1 else "")


def _after(offset: Mapping[str, int], tree: Tree) -> Mapping[str, int]:
    used = width(tree)
    return {kind: offset.get(kind, 0) + used.get(kind, 0) for kind in (*offset, *used)}

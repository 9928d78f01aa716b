"""Plan trees as plain data and back."""

from collections.abc import Callable

from rlinf.sched.document import Node, PlainData
from rlinf.sched.tree import ANY_TYPE, Leaf, Loop, Parallel, Spatial, Temporal, Tree

FORMAT = "rlinf-plan/1"
KINDS = ("component", "temporal", "spatial", "parallel", "loop")


def plain_tree(tree: Tree) -> PlainData:
    """A tree as nested mappings, each with one key that says its kind."""
    if isinstance(tree, Leaf):
        data: dict[str, object] = {"component": tree.component, "devices": tree.devices}
        if tree.micro_batches is not None:
            data["micro_batches"] = tree.micro_batches
        if tree.device_type:
            data["device_type"] = tree.device_type
        if tree.cores:
            data["cores"] = tree.cores
        return data
    if isinstance(tree, Loop):
        members = [plain_tree(member) for member in tree.members]
        return {"loop": {"rounds": tree.rounds, "parts": tree.parts, "members": members}}
    inner: dict[str, object] = {}
    if isinstance(tree, Temporal):
        if tree.switch_s:
            inner["switch_s"] = tree.switch_s
        if tree.resident:
            inner["resident"] = True
    elif isinstance(tree, Spatial):
        inner["micro_batches"] = tree.micro_batches
    inner |= {"first": plain_tree(tree.first), "second": plain_tree(tree.second)}
    return {type(tree).__name__.lower(): inner}


def read_tree(node: Node) -> Tree:
    """The tree that :func:`plain_tree` wrote.

    Raises:
        PlanError: names the path and the reason.
    """
    entries = node.entries()
    found = [kind for kind in KINDS if kind in entries]
    if len(found) != 1:
        node.fail(f"expected exactly one of {', '.join(KINDS)}, found {sorted(entries)}")
    kind = found[0]
    if kind == "component":
        return _read_leaf(node)
    node.fields((kind,))
    return _READERS[kind](entries[kind])


def _read_leaf(node: Node) -> Leaf:
    fields = node.fields(("component", "devices"), ("micro_batches", "device_type", "cores"))
    return Leaf(
        component=fields["component"].text(),
        devices=fields["devices"].integer(1),
        micro_batches=fields["micro_batches"].integer(1) if "micro_batches" in fields else None,
        device_type=fields["device_type"].text() if "device_type" in fields else ANY_TYPE,
        cores=fields["cores"].integer() if "cores" in fields else 0,
    )


def _read_temporal(node: Node) -> Temporal:
    fields = node.fields(("first", "second"), ("switch_s", "resident"))
    return Temporal(
        read_tree(fields["first"]),
        read_tree(fields["second"]),
        switch_s=fields["switch_s"].number() if "switch_s" in fields else 0.0,
        resident=fields["resident"].flag() if "resident" in fields else False,
    )


def _read_spatial(node: Node) -> Spatial:
    fields = node.fields(("first", "second", "micro_batches"))
    parts = fields["micro_batches"].integer(1)
    return Spatial(read_tree(fields["first"]), read_tree(fields["second"]), parts)


def _read_parallel(node: Node) -> Parallel:
    fields = node.fields(("first", "second"))
    return Parallel(read_tree(fields["first"]), read_tree(fields["second"]))


def _read_loop(node: Node) -> Loop:
    fields = node.fields(("rounds", "members"), ("parts",))
    members = tuple(_read_leaf(member) for member in fields["members"].items())
    parts = fields["parts"].integer(1) if "parts" in fields else 1
    return Loop(members, fields["rounds"].integer(1), parts)


_READERS: dict[str, Callable[[Node], Tree]] = {
    "temporal": _read_temporal,
    "spatial": _read_spatial,
    "parallel": _read_parallel,
    "loop": _read_loop,
}

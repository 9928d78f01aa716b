"""Improving plans by laying their neighbours out in time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.tree import Leaf, Loop, Spatial, Tree, width

ROUNDS = 6
TRIES = 400
GAIN = 1 - 1e-9


def polish(
    plans: Sequence[Tree], model: CostModel, micro_batches: Sequence[int] = ()
) -> tuple[float, Tree]:
    """The best of the plans, improved by changing one thing at a time; and its seconds.

    Tried: the next larger and smaller size of a component, half and twice the micro-batches of a
    segment or of a component, a component in or out of its pipeline. The number of tries is
    fixed, so the answer does not depend on the clock.

    Args:
        micro_batches: the only numbers allowed beside 1; empty: any.
    """
    timed = [(evaluate(plan, model).seconds, k) for k, plan in enumerate(plans)]
    seconds, best = min(timed)
    tree, tries = plans[best], 0
    for _ in range(ROUNDS):
        before = seconds
        for neighbour in list(_neighbours(tree, model, micro_batches)):
            tries += 1
            if tries > TRIES or not _fits(neighbour, model):
                continue
            there = evaluate(neighbour, model).seconds
            if there < seconds * GAIN:
                seconds, tree = there, neighbour
        if seconds >= before * GAIN:
            break
    return seconds, tree


def _fits(tree: Tree, model: CostModel) -> bool:
    total = len(model.machine.devices)
    counts = dict(zip(model.machine.types, model.machine.counts.tolist(), strict=False))
    used = width(tree)
    return all(n <= counts.get(kind, total) for kind, n in used.items())


def _neighbours(tree: Tree, model: CostModel, micro_batches: Sequence[int]) -> Iterator[Tree]:
    if isinstance(tree, Leaf):
        yield from _resized(tree, model)
        yield from _recut(tree, model, micro_batches)
        return
    if isinstance(tree, Loop):
        return
    for first in _neighbours(tree.first, model, micro_batches):
        yield replace(tree, first=first)
    for second in _neighbours(tree.second, model, micro_batches):
        yield replace(tree, second=second)
    if isinstance(tree, Spatial):
        for parts in (tree.micro_batches // 2, tree.micro_batches * 2):
            if 1 <= parts <= model.batch and (not micro_batches or parts in (1, *micro_batches)):
                yield replace(tree, micro_batches=parts)


def _resized(leaf: Leaf, model: CostModel) -> Iterator[Leaf]:
    if model.tight or leaf.cores:
        return
    known = model.sizes(model.graph[leaf.component], len(model.machine.devices))
    sizes = [int(n) for n in known]
    at = sizes.index(leaf.devices) if leaf.devices in sizes else 0
    for k in (at - 1, at + 1):
        if 0 <= k < len(sizes):
            yield replace(leaf, devices=sizes[k])


def _recut(leaf: Leaf, model: CostModel, micro_batches: Sequence[int]) -> Iterator[Leaf]:
    own = leaf.micro_batches
    if not model.graph[leaf.component].chunked:
        return
    yield replace(leaf, micro_batches=1 if own is None else None)
    for parts in (own // 2, own * 2) if own else ():
        if 1 <= parts <= model.batch and (not micro_batches or parts in (1, *micro_batches)):
            yield replace(leaf, micro_batches=parts)

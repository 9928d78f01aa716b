"""Workflows: order, cycles, complaints."""

import pytest

from rlinf.sched import Component, FlowGraph, GraphError


def test_order_is_topological_and_stable():
    graph = FlowGraph(
        tuple(Component(n) for n in "dcba"), (("a", "b"), ("b", "d"), ("a", "c"), ("c", "d"))
    )
    assert graph.order() == ("a", "c", "b", "d")


def test_a_cycle_is_condensed_and_keeps_its_place():
    graph = FlowGraph(
        tuple(Component(n) for n in ("train", "policy", "simulator", "seed")),
        (("seed", "policy"), ("policy", "simulator"), ("simulator", "policy"), ("policy", "train")),
    )
    assert graph.cycles() == (("policy", "simulator"),)
    condensed, members = graph.condensed()
    assert condensed.order() == ("seed", "policy+simulator", "train")
    assert members == {"policy+simulator": ("policy", "simulator")}
    assert graph.order() == ("seed", "policy", "simulator", "train")


@pytest.mark.parametrize(
    ("names", "edges", "message"),
    [
        ((), (), "at least one"),
        (("a", "a"), (), "repeat: a"),
        (("a",), (("a", "b"),), "no component 'b'"),
        (("a b",), (), "without spaces"),
    ],
)
def test_nonsense_is_named(names, edges, message):
    with pytest.raises(GraphError, match=message):
        FlowGraph(tuple(Component(n) for n in names), edges)

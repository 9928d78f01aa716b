import pytest

from rlinf.comm import CommConfig, Endpoint, MemoryRegistry
from rlinf.debug import connection_graph, visualize_connection_graph


def test_the_graph_shows_who_is_connected_over_what():
    registry = MemoryRegistry()
    tcp = CommConfig(backend_priority=("tcp",))
    a = Endpoint("a/0", registry=registry, config=tcp)
    b = Endpoint("b/0", registry=registry)
    c = Endpoint("c/0", registry=registry)
    with a, b, c, Endpoint("viewer/0", registry=registry) as viewer:
        a.send(1, "b/0")
        c.send(1, "b/0")
        graph = connection_graph(viewer)
        edges = [(str(e.one), str(e.other), e.transport) for e in graph.connections]
        assert edges == [("a/0", "b/0", "tcp"), ("b/0", "c/0", "inproc")]
        assert [str(w.id) for w in graph.workers] == ["a/0", "b/0", "c/0", "viewer/0"]
        text = visualize_connection_graph(graph)
        assert "a/0  [cpu" in text
        assert "inproc -- c/0" in text
        dot = visualize_connection_graph(graph, form="dot")
        assert dot.startswith("graph")
        assert '"a/0" -- "b/0" [label="tcp"];' in dot
        with pytest.raises(ValueError, match="dot"):
            visualize_connection_graph(graph, form="svg")

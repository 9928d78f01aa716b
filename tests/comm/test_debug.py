"""The graph of connections, its drawings, and the trace."""

import dataclasses
import io
import json
import xml.etree.ElementTree as ElementTree

import pytest

from rlinf.comm import ChromeTraceSink, CommConfig, Endpoint, MemoryRegistry, WorkerId
from rlinf.comm.testing import eventually
from rlinf.debug import Connection, ConnectionGraph, connection_graph, visualize_connection_graph
from rlinf.debug.drawing import COLOURS


@pytest.fixture
def four():
    registry = MemoryRegistry()
    tcp = CommConfig(backend_priority=("tcp",), connection_timeout_s=30.0)
    with (
        Endpoint("a/0", registry=registry, config=tcp) as a,
        Endpoint("b/0", registry=registry) as b,
        Endpoint("c/0", registry=registry) as c,
        Endpoint("viewer/0", registry=registry) as viewer,
    ):
        a.send(b"x" * 5000, "b/0")
        b.recv("a/0")
        c.send(1, "b/0")
        yield a, b, c, viewer


def test_the_graph_shows_who_is_connected_over_what_and_why(four):
    graph = connection_graph(four[3])
    assert [str(worker.id) for worker in graph.workers] == ["a/0", "b/0", "c/0", "viewer/0"]
    assert graph.silent == ()
    first, second = graph.connections
    assert (str(first.one), str(first.other), first.transport) == ("a/0", "b/0", "tcp")
    assert first.because.startswith("tcp: preferred by backend_priority")
    assert (str(second.one), str(second.other), second.transport) == ("b/0", "c/0", "inproc")
    assert second.because == "inproc: both are in the same process"
    for edge in graph.connections:
        assert edge.state == "up"
        assert edge.waiting == 0
        assert 0 < edge.latency_s < 1
    assert 5000 <= first.nbytes < 6000


def test_a_worker_that_does_not_answer_is_silent_and_what_waits_is_shown(four):
    a, _, _, viewer = four
    ghost = dataclasses.replace(a.record, id=WorkerId("ghost", 0), addresses=())
    viewer.registry.register(ghost).result()
    a.isend("never", "ghost/1", timeout=None)
    graph = connection_graph(viewer, timeout_s=0.3)
    assert [str(id) for id, _ in graph.silent] == ["ghost/0"]
    waiting = next(edge for edge in graph.connections if str(edge.other) == "ghost/1")
    assert (waiting.state, waiting.waiting, waiting.transport) == ("resolving", 1, "")
    assert "silent" in visualize_connection_graph(graph)


def test_a_connection_closed_for_want_of_use_is_absent(four):
    a, b, _, viewer = four
    a._in.manager.close_idle(lambda peer: False)
    a._in.manager.close_idle(lambda peer: False)
    eventually(lambda: b.statistics().connections.get("a/0") is None)
    edge = connection_graph(viewer).connections[0]
    assert (edge.state, edge.transport) == ("absent", "")
    assert edge.nbytes >= 5000


def drawn():
    """A graph of two hosts."""
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry) as a:
        record = a.record
    workers = tuple(
        dataclasses.replace(record, id=WorkerId(group, rank), host=host, pid=100 + rank)
        for group, rank, host in (("a", 0, "x"), ("b", 0, "x"), ("b", 1, "x"), ("c", 0, "y"))
    )
    one, two, three, four = (worker.id for worker in workers)
    edges = (
        Connection(one, two, "shm", "shm: one host", "up", 3_000_000, 0, 0.0002),
        Connection(one, three, "shm", 'shm: one "host" & <more>', "up", 10, 0, 0.0003),
        Connection(three, four, "", "", "dialling", 0, 4, None),
        Connection(two, four, "tcp", "tcp: different hosts", "up", 2_500_000_000, 0, 0.001),
    )
    return ConnectionGraph(workers, edges, ((three, "no answer"),))


def test_the_drawing_as_text():
    text = visualize_connection_graph(drawn())
    assert text.splitlines()[:3] == [
        "host 0",
        "  a/0  [cpu, pid 100]",
        "    -- b/0: shm, 3 MB, 0.20 ms  (shm: one host)",
    ]
    assert "    -- c/0: -, 0 B, dialling, 4 waiting  ()" in text
    assert "  b/1  [cpu, pid 101]  silent: no answer" in text


def test_the_drawing_for_graphviz():
    dot = visualize_connection_graph(drawn(), form="dot")
    assert dot.startswith("graph connections {")
    assert dot.count("subgraph") == 2
    assert '"b/0" -- "c/0" [label="tcp, 2.5 GB, 1.00 ms", tooltip="tcp: different hosts"' in dot
    assert "style=dashed" in dot
    assert dot.count("{") == dot.count("}")


def test_the_drawing_as_a_picture(tmp_path):
    path = tmp_path / "graph.svg"
    svg = visualize_connection_graph(drawn(), form="svg", path=path)
    assert path.read_text() == svg
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    words = {text.text for text in root.iter(f"{space}text")}
    assert {"host 0", "host 1", "a/0", "b/1", "shm, 3 MB, 0.20 ms"} <= words
    assert "cpu, pid 101 silent" in words
    assert len(list(root.iter(f"{space}path"))) == 4
    titles = [title.text for title in root.iter(f"{space}title")]
    assert 'shm: one "host" & <more>' in titles
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{space}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert x + float(box.get("width")) <= width
        assert y + float(box.get("height")) <= height
    with pytest.raises(ValueError, match="one of text, dot, svg, png"):
        visualize_connection_graph(drawn(), form="jpeg")


def test_the_drawing_as_pixels(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "graph.png"
    data = visualize_connection_graph(drawn(), form="png", path=path)
    assert path.read_bytes() == data
    pixels = image.imread(io.BytesIO(data))[..., :3]
    svg = ElementTree.fromstring(visualize_connection_graph(drawn(), form="svg"))
    assert pixels.shape[:2] == (2 * int(svg.get("height")), 2 * int(svg.get("width")))
    colours = {tuple(c) for c in (255 * pixels).round().astype(int).reshape(-1, 3)}
    for transport in ("shm", "tcp"):
        assert tuple(bytes.fromhex(COLOURS[transport][1:])) in colours


PHASES = {"X": {"dur"}, "i": {"s"}, "M": {"args"}, "s": {"id"}, "f": {"id"}}


def check_trace(trace):
    """What the Trace Event Format asks of each row; Perfetto drops rows that lack it."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    for row in trace["traceEvents"]:
        assert row["ph"] in PHASES, row
        assert {"name", "pid"} | PHASES[row["ph"]] <= row.keys(), row
        assert isinstance(row["name"], str)
        assert isinstance(row["pid"], int)
        if row["ph"] != "M":
            assert isinstance(row["tid"], int)
            assert row["ts"] >= 0
        if row["ph"] == "i":
            assert row["s"] in ("g", "p", "t")
        if row["ph"] == "X":
            assert row["dur"] >= 0
        if row["ph"] == "f":
            assert row["bp"] == "e"


def test_a_trace_opens_in_perfetto_and_links_what_was_sent_to_what_came(tmp_path):
    registry = MemoryRegistry()
    sinks = [ChromeTraceSink("a/0"), ChromeTraceSink("b/0")]
    with (
        Endpoint("a/0", registry=registry, sink=sinks[0]) as a,
        Endpoint("b/0", registry=registry, sink=sinks[1]) as b,
    ):
        for number in range(3):
            a.send(number, "b/0", tag=7)
            assert b.recv("a/0", tag=7) == number
        b.send("back", "a/0")
        assert a.recv("b/0") == "back"
    for number, sink in enumerate(sinks):
        sink.write(tmp_path / f"{number}.json")
    traces = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    for trace in traces:
        check_trace(trace)
    starts = {r["id"] for t in traces for r in t["traceEvents"] if r["ph"] == "s"}
    ends = {r["id"] for t in traces for r in t["traceEvents"] if r["ph"] == "f"}
    assert len(starts) == len(ends) == 4
    assert starts == ends
    names = {row["name"] for row in traces[0]["traceEvents"]}
    assert {"send message to b/0", "recv message from b/0", "Connected b/0"} <= names

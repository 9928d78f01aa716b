"""rlinf.debug: a lens on rlinf.comm. Who is connected to whom, over what, and why."""

from rlinf.debug.drawing import visualize_connection_graph
from rlinf.debug.graph import Connection, ConnectionGraph, connection_graph

__all__ = ["Connection", "ConnectionGraph", "connection_graph", "visualize_connection_graph"]

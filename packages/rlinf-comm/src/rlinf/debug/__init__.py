"""rlinf.debug: a lens on rlinf.comm. Who is connected to whom, over what."""

from rlinf.debug.graph import (
    Connection,
    ConnectionGraph,
    connection_graph,
    visualize_connection_graph,
)

__all__ = ["Connection", "ConnectionGraph", "connection_graph", "visualize_connection_graph"]

"""Ways of moving frames between two endpoints, found by the entry point `rlinf.transports`."""

__all__: list[str] = []

"""rlinf.comm."""

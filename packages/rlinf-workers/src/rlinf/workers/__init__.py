"""rlinf.workers."""

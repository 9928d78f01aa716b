"""rlinf.sched."""

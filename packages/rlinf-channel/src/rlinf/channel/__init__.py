"""rlinf.channel."""

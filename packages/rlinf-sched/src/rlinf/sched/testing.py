"""Models beside the fast things: brute force and an independent simulator."""

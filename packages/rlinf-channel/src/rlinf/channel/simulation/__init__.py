"""Seeded simulation of everything that can go wrong around a channel server. See `world`."""

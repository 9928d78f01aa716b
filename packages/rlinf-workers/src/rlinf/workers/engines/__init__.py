"""Engines: what fills the roles. Import the one you need; each brings its own heavy imports."""

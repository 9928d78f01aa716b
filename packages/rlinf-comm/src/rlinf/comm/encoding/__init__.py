"""The inside of `rlinf.comm.codec`: walking an object, and building it again."""

__all__: list[str] = []

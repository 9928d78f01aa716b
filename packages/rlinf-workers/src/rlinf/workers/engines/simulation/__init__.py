"""Environments in processes: shared memory, the process, and the simulator that drives them."""

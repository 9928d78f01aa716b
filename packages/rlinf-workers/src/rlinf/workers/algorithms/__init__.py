"""Advantages, losses, KL estimates, masked reductions and balancing: pure functions.

Every function works on tensors on any device, keeps the inputs untouched, and accepts masks of any
dtype (bool, integer, float: non-zero means that the position counts).
"""

"""A package as a third party would write it: transports found by their entry points.

Put the folder above on `sys.path` (installing it would do the same). `pathway` is the example to
start from; `fakes` has the device transports over host memory, for tests without a GPU.
"""

"""One module per side of peers.py and limit.py: an attention implementation with its own memory.

A module has a class `Side(case)`, or several that are selected as `MODULE:CLASS`; see common.py. Only
bench/side_worker.py imports it, in the process and environment of that side, so it may import that environment's
packages.
"""

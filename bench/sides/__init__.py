"""One file per side of peers.py and limit.py: who computes the attention of a shape, over memory of its own.

A module has a class `Side(case)`, or several that are named `MODULE:CLASS`; see common.py. It is imported only in the
process and environment of that side, by bench/side_worker.py, so it may import what only that environment has.
"""

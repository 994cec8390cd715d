"""Several engines behind one front end, as an application of Ray Serve. See docs/guide/cluster.md.

Needs the extra `ray`.
"""

from pagepool.cluster.ray.application import serve

__all__ = ["serve"]

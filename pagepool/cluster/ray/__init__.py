"""Several engines behind one front end, as an application of Ray Serve. See docs/guide/cluster.md.

Needs the extra `ray`.
"""

from pagepool.cluster.ray.application import Cluster, serve

__all__ = ["Cluster", "serve"]

"""Several engines behind one door, as an application of Ray Serve. Needs the extra `ray`. See docs/guide/cluster.md."""

from pagepool.cluster.ray.application import serve

__all__ = ["serve"]

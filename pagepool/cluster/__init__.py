"""Several engines behind one front end: the router, the front end, the workers. See docs/guide/cluster.md."""

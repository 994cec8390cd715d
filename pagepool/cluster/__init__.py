"""A cluster of engines: the front end, the router and the workers. See docs/guide/cluster.md."""

"""Models: the networks of a base and the names of their weights."""

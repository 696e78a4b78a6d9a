"""The side of an aggregator: one process that serves many jobs, each in its turn."""

"""The side of an aggregator shard: one process serves many jobs in turn."""

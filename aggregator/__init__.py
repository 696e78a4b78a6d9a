"""The aggregator program: a supervisor and one process per shard, each serving many jobs."""

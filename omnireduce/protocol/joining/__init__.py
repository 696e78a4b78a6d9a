"""How the ranks of a job come together on a shard, or by a relay: admission, elastic jobs, refusals."""

"""Joining: the ranks of a job come together on a shard or a relay. Admission, elastic jobs, refusals."""

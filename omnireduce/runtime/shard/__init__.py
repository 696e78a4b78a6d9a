"""The aggregator's side: one process serves many jobs, each in its turn."""

"""What runs the machines: ranks, shards, and what both sides use."""

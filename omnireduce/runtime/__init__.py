"""Runs the machines of `omnireduce.protocol`: ranks, shards, and the code that both sides share."""

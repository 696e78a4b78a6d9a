"""Benchmarks: the service against what a user would pick instead, in one run, the rounds of all interleaved."""

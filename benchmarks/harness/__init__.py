"""Ranks as processes, hosts with shaped links, and verdicts, for all benchmarks."""

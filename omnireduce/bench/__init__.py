"""Benchmarks that are correctness tests first: sparse data with exact results, timed runs, their report."""

"""`omnireduce bench`, a correctness test first: sparse data with exact results, timed runs, their rows."""

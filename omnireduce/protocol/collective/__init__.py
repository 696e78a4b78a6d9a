"""One collective: what a rank sends, how a shard merges it, and what comes back."""

"""Recording of a traced job: spans, and links that record. Rank and shard each have further parts of their own."""

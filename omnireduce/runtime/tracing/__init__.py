"""Recording of a traced job: spans, and links that record. `runtime/rank` and `runtime/shard` have further parts."""

"""Links that carry messages between one worker and one aggregator shard; they know nothing of the protocol."""

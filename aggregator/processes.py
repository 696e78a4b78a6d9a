"""The number of processes of a daemon."""

from __future__ import annotations

from omnireduce.config import Config


def process_count(config: Config) -> int:
    """The supervisor, the shards and, where there are metrics, the monitor."""
    return 1 + config.aggregator.shards + bool(config.metrics.listen)

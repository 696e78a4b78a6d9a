"""The configuration. `schema` defines all keys, `validation` checks their values, and `loading` reads them."""

from __future__ import annotations

from omnireduce.support.config.loading import (
    check_config,
    dump_config,
    dump_tables,
    load_config,
    override_config,
    reference_toml,
    split_list,
    whole_bytes,
)
from omnireduce.support.config.schema import (
    Aggregator,
    Bench,
    Cluster,
    Config,
    Elastic,
    Log,
    Metrics,
    Protocol,
    Security,
    Trace,
    Train,
    Transport,
    Verbs,
)

__all__ = [
    "Aggregator", "Bench", "Cluster", "Config", "Elastic", "Log", "Metrics", "Protocol", "Security", "Trace", "Train",
    "Transport", "Verbs", "check_config", "dump_config", "dump_tables", "load_config", "override_config",
    "reference_toml", "split_list", "whole_bytes",
]  # fmt: skip

"""Some ranks of a job that have a communicator of their own."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from omnireduce.config import Config
from omnireduce.config.schema import Elastic
from omnireduce.errors import UsageError


def check_group(ranks: Sequence[int], own: int, size: int, name: str, taken: Sequence[str]) -> None:
    """Raises UsageError unless these are ranks of a job of `size`, each once, `own` is among them, and `name` is none
    of those that are taken."""
    if name in taken:
        raise UsageError(f"there is a group {name!r} already: give another name, or shut that one down")
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < size:
        raise UsageError(f"ranks {list(ranks)}: expected different ones from 0 to {size - 1}")
    if own not in ranks:
        raise UsageError(f"ranks {list(ranks)}: this is rank {own}, which is not among them")


def config_of_group(config: Config, launch: str, state_bytes: int) -> Config:
    """With which they join: the launch is that of the job. Programs may keep so much on each shard."""
    return replace(
        config,
        cluster=replace(config.cluster, launch=launch),
        elastic=Elastic(),
        protocol=replace(config.protocol, urgent_bytes=0, state_bytes=state_bytes),
    )

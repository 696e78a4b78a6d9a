"""Process groups: the job that some ranks of a job make for themselves, and the refusal of a rank to come to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from omnireduce.core.wire.control import Hello
from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.aggregator_client import refuse
from omnireduce.support.config import Config, check_config
from omnireduce.support.config.schema import Elastic
from omnireduce.support.secret import Secret, load_secret

HEARD_S = 10.0  # the longest wait of a rank that refuses until the aggregator has heard it


def check_group(ranks: Sequence[int], own_rank: int, size: int, name: str, taken_names: Sequence[str]) -> None:
    """Raises UsageError unless `ranks` are different ranks of a job of `size`, with `own_rank` among them, and `name`
    is not taken."""
    if name in taken_names:
        raise UsageError(f"there is a group {name!r} already: give another name, or shut that group down")
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < size:
        raise UsageError(f"ranks {list(ranks)}: expected different ranks from 0 to {size - 1}")
    if own_rank not in ranks:
        raise UsageError(f"ranks {list(ranks)}: this is rank {own_rank}, which is not among them")


def job_of_group(job: str, name: str, generation: int) -> str:
    """The name of a group's job. It tells aggregators to which job the group belongs."""
    return f"{job}+{name}.{generation}"


def config_of_group(config: Config, launch: str, state_bytes: int) -> Config:
    """The configuration with which the ranks of a group join. `launch`: the launch of the job. Programs may keep
    `state_bytes` on each shard. Raises ConfigError."""
    return check_config(
        replace(
            config,
            cluster=replace(config.cluster, launch=launch),
            elastic=Elastic(),
            protocol=replace(config.protocol, urgent_bytes=0, state_bytes=state_bytes),
        )
    )


def refuse_to_come(config: Config, hello: Hello, reason: str, secret: Secret | None) -> None:
    """Tell the ranks that wait for this rank in the group of `hello` why it does not come.

    All of them come to the first aggregator first, and it tells them. Returns when the aggregator has heard: the next
    hello of this rank must not overtake this hello. Raises nothing if the aggregator cannot be reached: then the job is
    about to end.
    """
    hello = replace(
        hello, refuses=reason, min_ranks=0, last_call_s=0.0, formation=0, survived=0, ticket=b"", state_bytes=0,
        memory="",
    )  # fmt: skip
    with suppress(OmniReduceError, OSError):
        secret = load_secret(config.security) if secret is None else secret
        refuse(config.cluster.aggregators[0], config, HEARD_S, hello, secret)

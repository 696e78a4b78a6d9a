"""The section of the configuration about the aggregator daemon: where it listens, what it takes, how it ends."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omnireduce.config.meta import LISTEN_ALLOWED, Address, Section
from omnireduce.config.meta import meta as _meta
from omnireduce.config.protocol import OwnCodec


class Aggregator(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "The aggregator daemon."

    listen: Annotated[
        str,
        _meta(
            "address of shard 0; shard i listens on PORT + i (port 0: the system picks them)",
            allowed=LISTEN_ALLOWED,
        ),
    ] = "localhost:7400"
    shards: Annotated[int, _meta("shards of this daemon, each its own process", "processes", ge=1, le=64)] = 1
    upstream: Annotated[
        tuple[Address, ...],
        Meta(max_length=4096),
        _meta(
            "aggregators above this one, which is then a relay: it sends them the sums of its workers, as one worker "
            "would, and passes their results on. Shard i of a job goes on to address i; none: this is no relay"
        ),
    ] = ()
    codecs: Annotated[
        tuple[OwnCodec, ...],
        Meta(max_length=64),
        _meta(
            "codecs beyond those that are built in which jobs may use, each module:Class; the daemon runs their code, "
            "and it must be importable"
        ),
    ] = ()
    max_jobs: Annotated[int, _meta("jobs served at once; more are refused", "jobs", ge=1, le=65536)] = 64
    max_world_size: Annotated[int, _meta("largest world size of a job", "ranks", ge=1, le=32_000)] = 1024
    max_job_bytes: Annotated[
        int,
        _meta(
            "most memory of slots and state of one job on one shard, which is (world size + 1) x protocol.slots x "
            "protocol.slot_bytes + protocol.state_bytes: the default is enough for 226 ranks with the default slots; "
            "over tcp results may take as much again",
            "bytes",
            ge=2**20,
            le=2**40,
        ),
    ] = 1 << 30
    max_ranks: Annotated[
        int, _meta("most ranks of all jobs together on one shard; each is a connection", "ranks", ge=1, le=2**20)
    ] = 16_384
    max_bytes: Annotated[
        int,
        _meta(
            "most memory of slots and state of all jobs together on one shard; no less than max_job_bytes",
            "bytes",
            ge=2**20,
            le=2**44,
        ),
    ] = 4 << 30
    drain_s: Annotated[
        float,
        _meta(
            "how long jobs may go on after SIGTERM, while new ones are refused; a second SIGTERM ends that; 0: not at "
            "all. `omnireduce drain` waits for them without a limit",
            "seconds",
            ge=0,
            le=604800,
        ),
    ] = 0.0
    finish_s: Annotated[
        float,
        _meta(
            "how long running collectives may take to finish before the daemon ends their jobs",
            "seconds",
            ge=0,
            le=86400,
        ),
    ] = 10.0
    join_timeout_s: Annotated[
        float, _meta("how long an incomplete job may wait for its missing ranks", "seconds", ge=0.1, le=86400)
    ] = 300.0
    hello_timeout_s: Annotated[
        float,
        _meta("how long a connection may take to prove the secret and say hello", "seconds", ge=0.1, le=3600),
    ] = 10.0
    straggler_s: Annotated[
        float,
        _meta(
            "log which ranks a collective waits for once no result has left for so long; it is looked at after "
            "1, 2, 4, 8 ... seconds",
            "seconds",
            ge=0,
            le=86400,
        ),
    ] = 1.0
    watchdog_s: Annotated[
        float, _meta("a shard that takes no turn for so long is replaced; 0: never", "seconds", ge=0, le=86400)
    ] = 30.0

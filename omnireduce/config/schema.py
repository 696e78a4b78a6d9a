"""The schema of the configuration: one frozen struct per section of the TOML file.

The annotations are the single source of truth: `omnireduce.config.keys` reads ranges, meanings and units from
them to check values and to word errors, `omnireduce.config.reference_toml` to write the reference file.
Constructing a struct in Python does not check it; `omnireduce.config.check_config` does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from omnireduce.config.aggregator import Aggregator
from omnireduce.config.meta import Address, Section
from omnireduce.config.meta import meta as _meta
from omnireduce.config.protocol import Protocol
from omnireduce.config.security import Metrics, Security

Dtype = Literal[
    "float16", "bfloat16", "float32", "float64",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip
Op = Literal["sum", "mean", "min", "max", "prod"]
Overlap = Literal["random", "full", "none"]
Distribution = Literal["uniform", "zipf"]
Kind = Literal["auto", "shm", "tcp", "verbs"]
Level = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


JOB_PATTERN = r"^[A-Za-z0-9._:@+-]{1,128}\Z"
URGENT = "+urgent"  # behind the name of a job: that of its channel for urgent tensors
LAUNCH_PATTERN = r"^[A-Za-z0-9._:@+-]{0,128}\Z"
JOB_ALLOWED = "a string of 1 to 128 characters out of A-Z a-z 0-9 . _ : @ + -"
_Elements = Annotated[int, Meta(ge=0, le=2**40)]
_Density = Annotated[float, Meta(ge=0, le=1)]
_BenchBlock = Annotated[int, Meta(ge=0, le=65536, multiple_of=8)]
_AtLeastOne = Meta(min_length=1, max_length=4096)
_SEED = 2**63 - 1


class Cluster(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Where the aggregators are and which job this worker belongs to."

    aggregators: Annotated[
        tuple[Address, ...],
        Meta(max_length=4096),
        _meta(
            "address of every aggregator shard; the same list in the same order on every worker. Where there is none, "
            "rank 0 starts one for its job, whose ranks must all be on one host"
        ),
    ] = ()
    job: Annotated[
        str,
        _meta(
            'name of the job, the same on every worker; "auto" takes the launcher\'s own id, or "default"',
            pattern=JOB_PATTERN,
            allowed=JOB_ALLOWED,
        ),
    ] = "auto"
    launch: Annotated[
        str,
        _meta(
            "what tells this launch from another one, the same on every worker of it: workers of different launches "
            'never meet, whatever their job is called; "auto" takes what the launcher gives, "" tells nothing apart',
            pattern=LAUNCH_PATTERN,
            allowed=f'"auto", "" or {JOB_ALLOWED}',
        ),
    ] = "auto"
    timeout_s: Annotated[float, _meta("longest time that one collective may take", "seconds", ge=0.1, le=86400)] = 60.0
    join_timeout_s: Annotated[
        float, _meta("longest time to reach the aggregators and be admitted", "seconds", ge=0.1, le=86400)
    ] = 30.0


class Elastic(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Jobs that go on with other workers after a fault."

    enabled: Annotated[
        bool, _meta("survivors may form the job anew, and workers that are started again may join it; on every worker")
    ] = False
    smallest: Annotated[int, _meta("fewest workers that go on", "workers", ge=1, le=2**20)] = 1
    settle_s: Annotated[
        float,
        _meta(
            "how long survivors wait for others since the last one came; more than a step of training",
            "seconds",
            ge=0,
            le=3600,
        ),
    ] = 5.0


class Transport(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "How bytes travel between workers and aggregators, and between workers of one host."

    kind: Annotated[
        Kind,
        _meta('"auto" picks for each link: shm on one host, verbs where both ends have it on the way, else tcp'),
    ] = "auto"
    host_exchange: Annotated[
        Literal["auto", "off"],
        _meta(
            '"auto": ranks of one host, and of one user, exchange tensors in memory that they share; if the job has '
            'several hosts, each host then sends the aggregators one sum; "off": this rank sends its own'
        ),
    ] = "auto"
    spin_us: Annotated[
        int,
        _meta(
            "how long a thread that waits for ranks of its own host, or for a tensor of up to 1 MiB, polls before it "
            "sleeps; for a larger tensor from aggregators a tenth of it",
            "microseconds",
            ge=0,
            le=1_000_000,
        ),
    ] = 200
    threads: Annotated[
        int, _meta("of a worker, which work for different shards; 0: by processors and ranks", "threads", ge=0, le=64)
    ] = 0
    dead_peer_s: Annotated[
        float,
        _meta(
            "a tcp peer is dead that for so long acknowledges nothing, or takes no data while its buffers are full",
            "seconds",
            ge=0.5,
            le=600,
        ),
    ] = 4.0


class Verbs(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "RDMA: which device, and how its connections behave."

    device: Annotated[
        str,
        _meta(
            'RDMA device, as `ibv_devices` lists it; "auto" takes the one on the way to the aggregator, else the first '
            "that is active (OmniReduce: ib_hca)",
            pattern=r"^[A-Za-z0-9_.-]{1,64}\Z",
            allowed='"auto" or the name of a device',
        ),
    ] = "auto"
    port: Annotated[int, _meta("port of the device (OmniReduce: ib_port)", ge=1, le=255)] = 1
    gid_index: Annotated[
        int,
        _meta(
            "entry of the port's GID table; -1 takes the one for RoCE v2 with an IPv4 address (OmniReduce: gid_idx)",
            ge=-1,
            le=65535,
        ),
    ] = -1
    service_level: Annotated[
        int, _meta("service level of InfiniBand, priority of RoCE (OmniReduce: sl)", ge=0, le=15)
    ] = 0
    traffic_class: Annotated[int, _meta("traffic class: DSCP x 4, for switches with PFC or ECN", ge=0, le=255)] = 0
    path_mtu: Annotated[
        Literal[0, 256, 512, 1024, 2048, 4096], _meta("payload of the largest packet; 0 takes the port's", "bytes")
    ] = 0
    ack_timeout: Annotated[
        int, _meta("exponent of the wait for an acknowledgement: 4.096 us x 2^n before a retry", ge=1, le=31)
    ] = 16
    retry_count: Annotated[
        int,
        _meta("retries before a connection counts as broken; not 7, which some devices take as endless", ge=0, le=6),
    ] = 6


class Queue(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Collectives that ranks submit in any order, by name: torch's optimizer, Keras, `omnireduce.Queue`."

    fusion_bytes: Annotated[
        int,
        _meta(
            "small arrays of one type travel together, up to so many bytes in all; 0: each by itself (Horovod: fusion "
            "threshold)",
            "bytes",
            ge=0,
            le=2**30,
        ),
    ] = 1 << 20
    cycle_s: Annotated[
        float,
        _meta(
            "how long a rank lets further arrays come before it tells others what it is ready for (Horovod: cycle "
            "time). Steps that are alike need no such telling",
            "seconds",
            ge=0.0001,
            le=1,
        ),
    ] = 0.001


class Stall(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Ranks that do not come to a collective of the queue for which others wait."

    warn_s: Annotated[
        float, _meta("log which ranks are missing after so long, and again; 0: never", "seconds", ge=0, le=86400)
    ] = 60.0
    abort_s: Annotated[float, _meta("end the job after so long; 0: never", "seconds", ge=0, le=86400)] = 600.0


class Bench(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "The program `omnireduce bench`. A list of values is a sweep; several lists sweep over their product."

    elements: Annotated[
        _Elements | Annotated[tuple[_Elements, ...], _AtLeastOne], _meta("size of the tensor", "elements")
    ] = 26_214_400
    density: Annotated[
        _Density | Annotated[tuple[_Density, ...], _AtLeastOne],
        _meta("non-zero blocks / blocks of each worker's tensor", "fraction"),
    ] = (1.0, 0.1, 0.01)
    dtype: Annotated[Dtype | Annotated[tuple[Dtype, ...], _AtLeastOne], _meta("type of the elements")] = "float32"
    op: Annotated[Op | Annotated[tuple[Op, ...], _AtLeastOne], _meta("the reduction")] = "sum"
    block_size: Annotated[
        _BenchBlock | Annotated[tuple[_BenchBlock, ...], _AtLeastOne],
        _meta("size of a block; 0 takes protocol.block_size", "elements"),
    ] = 0
    overlap: Annotated[
        Overlap | Annotated[tuple[Overlap, ...], _AtLeastOne],
        _meta("where the non-zero blocks of the workers are: random, the same (full) or disjoint (none)"),
    ] = "random"
    distribution: Annotated[
        Distribution | Annotated[tuple[Distribution, ...], _AtLeastOne],
        _meta(
            "which blocks are likely to be non-zero: all (uniform), or the first ones by Zipf's law (zipf), as in an "
            "embedding whose rows are sorted by frequency"
        ),
    ] = "uniform"
    rounds: Annotated[int, _meta("timed rounds of each row", "rounds", ge=1, le=1_000_000)] = 20
    warmup: Annotated[int, _meta("rounds before the timed ones", "rounds", ge=0, le=1_000_000)] = 3
    seed: Annotated[int, _meta("seed of the data", ge=0, le=_SEED)] = 1


class Train(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "The program `omnireduce train`: word embeddings of the standard library's source files."

    steps: Annotated[int, _meta("training steps", "steps", ge=1, le=10_000_000)] = 200
    batch: Annotated[int, _meta("skip-gram pairs per rank and step", "pairs", ge=1, le=2**20)] = 256
    dim: Annotated[int, _meta("length of a word's vector", "elements", ge=1, le=4096)] = 256
    vocabulary: Annotated[int, _meta("most frequent words that are kept", "words", ge=2, le=10_000_000)] = 20_000
    negatives: Annotated[int, _meta("negative samples per pair", "words", ge=1, le=100)] = 5
    window: Annotated[int, _meta("context on each side of a word", "words", ge=1, le=100)] = 4
    learning_rate: Annotated[float, _meta("step size of the descent", ge=1e-6, le=1000)] = 0.05
    max_files: Annotated[
        int, _meta("most source files that are read; every tenth is held out", "files", ge=10, le=1_000_000)
    ] = 1000
    seed: Annotated[int, _meta("seed of the weights and samples", ge=0, le=_SEED)] = 1


class Trace(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Where the time goes: every worker, and every shard for every job, writes a file when the job is over."

    folder: Annotated[
        str,
        _meta(
            'folder for the traces, which `omnireduce trace` reads; "" is off. For diagnosis only: every job of '
            "a daemon leaves files",
            allowed='the path of a folder, or ""',
            path_but=("",),
            pattern=r"^[^\x00]*\Z",
        ),
    ] = ""
    events: Annotated[
        int,
        _meta("room of one trace, 29 bytes each when used; a full one stops", "events", ge=1, le=2**26),
    ] = 1 << 20
    timeline: Annotated[
        str,
        _meta(
            "file for one timeline of all ranks and shards, in the form of Chrome traces (Horovod: HOROVOD_TIMELINE). "
            "Each of them leaves its part in trace.folder or, if that is not set, in the folder FILE.parts beside it; "
            '"DYNAMIC" is "", and leaves it to `start_timeline`; "" is off',
            allowed='the path of a file, "DYNAMIC" or ""',
            path_but=("", "DYNAMIC"),
            pattern=r"^[^\x00]*\Z",
        ),
    ] = ""
    timeline_cycles: Annotated[
        bool,
        _meta("mark in the timeline when a queue looks for tensors to combine (Horovod: HOROVOD_TIMELINE_MARK_CYCLES)"),
    ] = False
    profile: Annotated[
        str,
        _meta(
            "folder where every rank leaves a table of its collectives when it ends, omnireduce_profile.RANK; "
            '"1" is the current folder; "" and "0" are off (variable: OMNIREDUCE_PROFILE)',
            allowed='the path of a folder, "1", "0" or ""',
            path_but=("", "0", "1"),
            pattern=r"^[^\x00]*\Z",
        ),
    ] = ""


class Log(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "What the programs say."

    level: Annotated[Level, _meta("least severity that is logged")] = "info"
    format: Annotated[LogFormat, _meta("how a line is written: key=value pairs, or an object of JSON")] = "text"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration, immutable and hashable; `load_config` makes a checked one."""

    cluster: Cluster = Cluster()
    elastic: Elastic = Elastic()
    transport: Transport = Transport()
    verbs: Verbs = Verbs()
    protocol: Protocol = Protocol()
    aggregator: Aggregator = Aggregator()
    security: Security = Security()
    metrics: Metrics = Metrics()
    queue: Queue = Queue()
    stall: Stall = Stall()
    bench: Bench = Bench()
    train: Train = Train()
    trace: Trace = Trace()
    log: Log = Log()

"""The schema of the configuration: one frozen struct per section of the TOML file.

The annotations are the single source of truth: `omnireduce.support.config.validation` reads ranges, meanings and units
from them to check values and to word errors, `omnireduce.support.config.reference_toml` to write the reference file.
Constructing a struct in Python does not check it; `omnireduce.support.config.check_config` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.names import JOB_ALLOWED, JOB_PATTERN, LAUNCH_PATTERN, TEAM_ALLOWED, TEAM_PATTERN


class Section(Struct, frozen=True):
    """A section of the configuration. The reference has `MEANING`, not the docstring, because Python can leave
    docstrings out (-OO)."""

    MEANING: ClassVar[str]


def meta(
    meaning: str, unit: str = "", *, allowed: str = "", path_unless: tuple[str, ...] | None = None, **limits: Any
) -> Meta:
    """The meaning of a key, its unit and its limits. `allowed` describes the allowed values, if the limits do not.
    `path_unless`: the value is a path, unless it is one of these words."""
    extra = {"unit": unit, "allowed": allowed} | ({} if path_unless is None else {"path_unless": path_unless})
    return Meta(description=meaning, extra=extra, **limits)


ADDRESS_ALLOWED = '"HOST:PORT" (an IPv6 address in brackets)'
LISTEN_ALLOWED = f'{ADDRESS_ALLOWED} or ":PORT", which is every address of this host'
Address = Annotated[str, meta("", allowed=ADDRESS_ALLOWED)]
FilePath = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{0,4096}\Z",
        extra={
            "allowed": 'a path without control characters; "" for none',
            "path_unless": ("",),
        },
    ),
]


_MODULE_AND_CLASS = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"
CODECS = ("none", "bf16", "fp16", "int8", "natural", "onebit", "qsgd", "scaled_sign", "sign", "ternary")
CODEC_PATTERN = rf"^({'|'.join(CODECS)}|(?=.{{3,50}}\Z){_MODULE_AND_CLASS})\Z"
CODEC_ALLOWED = f"{', '.join(CODECS)}, or module:Class of up to 50 characters"
UserCodec = Annotated[
    str, meta("", pattern=rf"^(?=.{{3,50}}\Z){_MODULE_AND_CLASS}\Z", allowed="module:Class of up to 50 characters")
]


class Protocol(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Blocks, slots and stripes; the same on every worker of a job."

    block_size: Annotated[
        int, meta("size of a block, the unit of sparsity", "elements", ge=8, le=65536, multiple_of=8)
    ] = 256
    slot_bytes: Annotated[
        int,
        meta(
            "size of a slot, the buffer of one message; a block of 8-byte elements and its framing must fit",
            "bytes",
            ge=65536,
            le=67108864,
            multiple_of=4096,
        ),
    ] = 3 << 19
    slots: Annotated[int, meta("slots, and so credits, of one link in one direction", "slots", ge=2, le=64)] = 3
    tcp_message_bytes: Annotated[
        int,
        meta(
            "the longest message over tcp; a message has a 64th of what goes to its shard, but no less than a quarter "
            "of this; elsewhere a message may fill its slot",
            "bytes",
            ge=4096,
            le=67108864,
        ),
    ] = 1 << 20
    scan_span: Annotated[
        int,
        meta("blocks scanned before a slot is sent that is not full yet", "blocks", ge=1, le=2**31),
    ] = 16_384
    stripe_blocks: Annotated[
        int,
        meta(
            "consecutive blocks that go to the same shard; of tensors that several hosts sum, a chunk instead",
            "blocks",
            ge=1,
            le=2**20,
        ),
    ] = 64
    whole_bytes: Annotated[
        int,
        meta(
            "tensors up to this size go to the first shard as a whole, if all aggregators are reached by loopback",
            "bytes",
            ge=0,
            le=2**30,
        ),
    ] = 1 << 20
    urgent_bytes: Annotated[
        int,
        meta(
            "arrays for allreduce up to this size have a separate channel, and do not wait for larger arrays; "
            "aggregators and teams see it as a second job, JOB+urgent; the same on every worker. 0: no such channel",
            "bytes",
            ge=0,
            le=2**20,
        ),
    ] = 0
    codec: Annotated[
        str,
        meta(
            f"how sums and means of float32 travel, unless a call says otherwise: {', '.join(CODECS)}, or "
            "module:Class, a codec of your own, which aggregators name, too (aggregator.codecs); the same on every "
            "worker. Ranks of one host exchange exactly, whatever this says",
            pattern=CODEC_PATTERN,
            allowed=CODEC_ALLOWED,
        ),
    ] = "none"
    codec_seed: Annotated[
        int, meta("seed of the codecs' random numbers; the same on every worker", ge=0, le=2**63 - 1)
    ] = 0
    max_part_bytes: Annotated[
        int,
        meta(
            "the largest object, or part of allgather_ragged, that one rank may send; the others take memory for it "
            "only when it comes",
            "bytes",
            ge=1024,
            le=2**34,
        ),
    ] = 1 << 30

    state_bytes: Annotated[
        int,
        meta(
            "memory for the states of block programs on each shard; with more than 0 all collectives go through the "
            "aggregators, even between ranks of one host; the same on every worker",
            "bytes",
            ge=0,
            le=2**40,
        ),
    ] = 0

    @property
    def has_own(self) -> bool:
        """Whether the codec is a class of the user."""
        return ":" in self.codec


Users = Literal["same", "any"]
SECRET_VARIABLE = "OMNIREDUCE_SECURITY_SECRET"
SECRET_KEY = "security.secret"  # no such key exists; the error for it says what to do instead
_JobsPattern = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._:@+*-]{1,128}\Z",
        extra={"allowed": "strings of 1 to 128 characters out of A-Z a-z 0-9 . _ : @ + -, and * for any of them"},
    ),
]


class Security(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Who may join: docs/security.md. A secret itself is no part of the configuration."

    secret_file: Annotated[
        FilePath,
        meta(
            "file with the secret that workers and aggregators prove to each other to know; only its owner may be "
            "allowed to read it, or a group of this process. It has up to 4 lines: a worker proves the first, an "
            "aggregator admits any. The variable OMNIREDUCE_SECURITY_SECRET can hold the secret instead"
        ),
    ] = ""
    team: Annotated[
        str,
        meta(
            'the team whose secret a worker has; "" is for the aggregators\' own secret',
            pattern=TEAM_PATTERN,
            allowed=TEAM_ALLOWED,
        ),
    ] = ""
    teams_folder: Annotated[
        FilePath,
        meta(
            "folder with a file for each team that an aggregator admits: NAME has its secret, and NAME.toml, if it "
            "exists, has the names and limits of its jobs"
        ),
    ] = ""
    allow_no_secret: Annotated[
        bool,
        meta("let an aggregator without a secret listen beyond loopback: all who can reach its port may join"),
    ] = False
    local_users: Annotated[
        Users,
        meta('whose processes share memory with this one: "same" is this user\'s and root\'s, "any" all on this host'),
    ] = "same"
    tls_certificate: Annotated[
        FilePath,
        meta("PEM file: this end's certificate. With it an aggregator takes TCP connections by TLS only"),
    ] = ""
    tls_key: Annotated[FilePath, meta("PEM file: the certificate's key; only its owner may be allowed to read it")] = ""
    tls_ca: Annotated[
        FilePath,
        meta(
            "PEM file: the authority that must have signed the other end's certificate. With it a worker connects by "
            "TLS, and an aggregator with TLS demands certificates of workers, too"
        ),
    ] = ""


class Metrics(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Metrics and health of the daemon by HTTP: /metrics for Prometheus, /healthz, /readyz. docs/operations.md"

    listen: Annotated[
        str,
        meta(
            'address to serve them at; "" serves none. Without token_file or tls_ca, anybody who reaches it sees the '
            "names of jobs and hosts",
            allowed=f'{LISTEN_ALLOWED}; or "" for none',
        ),
    ] = ""
    timeout_s: Annotated[
        float, meta("longest wait of a request for answers of the shards", "seconds", ge=0.1, le=60)
    ] = 1.0
    token_file: Annotated[
        FilePath,
        meta(
            "file with the bearer token for /metrics; /healthz and /readyz need none. Only its owner may be allowed to "
            "read it. It may have up to 4 lines, each a token"
        ),
    ] = ""
    tls_certificate: Annotated[
        FilePath, meta("PEM file: the certificate of these pages. With it they come by HTTPS only")
    ] = ""
    tls_key: Annotated[FilePath, meta("PEM file: its key; only its owner may be allowed to read it")] = ""
    tls_ca: Annotated[
        FilePath,
        meta("PEM file: the authority that must have signed the certificate of every client, even for health"),
    ] = ""


class TeamLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and job names of a team on each shard: its file NAME.toml in `security.teams_folder`."""

    jobs: Annotated[
        tuple[_JobsPattern, ...],
        Meta(min_length=1, max_length=64),
        meta('names of its jobs; without any NAME and "NAME.*"'),
    ] = ()
    max_jobs: Annotated[int, meta("most of its jobs at once", "jobs", ge=1, le=65536)] = 65536
    max_ranks: Annotated[int, meta("most ranks of its jobs together", "ranks", ge=1, le=2**20)] = 2**20
    max_bytes: Annotated[
        int, meta("most memory of slots and state of its jobs together", "bytes", ge=2**20, le=2**44)
    ] = 2**44


class Aggregator(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "The aggregator daemon."

    listen: Annotated[
        str,
        meta(
            "address of shard 0; shard i listens on PORT + i (port 0: the system picks them)",
            allowed=LISTEN_ALLOWED,
        ),
    ] = "localhost:7400"
    shards: Annotated[int, meta("shards of this daemon, each its own process", "processes", ge=1, le=64)] = 1
    upstream: Annotated[
        tuple[Address, ...],
        Meta(max_length=4096),
        meta(
            "aggregators above this one, which is then a relay: it sends them the sums of its workers, as one worker "
            "would, and passes their results on. Shard i of a job goes on to address i; none: this is no relay"
        ),
    ] = ()
    codecs: Annotated[
        tuple[UserCodec, ...],
        Meta(max_length=64),
        meta(
            "codecs that jobs may use beside the built-in codecs, each module:Class; the daemon runs their code, "
            "and it must be importable"
        ),
    ] = ()
    max_jobs: Annotated[int, meta("jobs served at once; more are refused", "jobs", ge=1, le=65536)] = 64
    max_world_size: Annotated[int, meta("largest world size of a job", "ranks", ge=1, le=32_000)] = 1024
    max_job_bytes: Annotated[
        int,
        meta(
            "most memory of slots and state of one job on one shard. A job needs (world size + 1) x protocol.slots x "
            "protocol.slot_bytes + protocol.state_bytes: the default is enough for 226 ranks with the default slots; "
            "over tcp results may take as much again",
            "bytes",
            ge=2**20,
            le=2**40,
        ),
    ] = 1 << 30
    max_ranks: Annotated[
        int, meta("most ranks of all jobs together on one shard; each is a connection", "ranks", ge=1, le=2**20)
    ] = 16_384
    max_bytes: Annotated[
        int,
        meta(
            "most memory of slots and state of all jobs together on one shard; no less than max_job_bytes",
            "bytes",
            ge=2**20,
            le=2**44,
        ),
    ] = 4 << 30
    drain_s: Annotated[
        float,
        meta(
            "time that jobs may go on after SIGTERM, while new jobs are refused; a second SIGTERM ends it; 0: no time. "
            "`omnireduce drain` waits for jobs without a limit",
            "seconds",
            ge=0,
            le=604800,
        ),
    ] = 0.0
    finish_s: Annotated[
        float,
        meta(
            "time for running collectives to finish before the daemon ends their jobs",
            "seconds",
            ge=0,
            le=86400,
        ),
    ] = 10.0
    join_timeout_s: Annotated[
        float, meta("longest wait of an incomplete job for its missing ranks", "seconds", ge=0.1, le=86400)
    ] = 300.0
    hello_timeout_s: Annotated[
        float,
        meta("longest time for a connection to prove the secret and say hello", "seconds", ge=0.1, le=3600),
    ] = 10.0
    straggler_s: Annotated[
        float,
        meta(
            "log which ranks a collective waits for once no result has left for so long; it is looked at after "
            "1, 2, 4, 8 ... seconds",
            "seconds",
            ge=0,
            le=86400,
        ),
    ] = 1.0
    watchdog_s: Annotated[
        float, meta("a shard that takes no turn for this long is replaced; 0: never", "seconds", ge=0, le=86400)
    ] = 30.0


if TYPE_CHECKING:
    Dtype = str
else:
    Dtype = Literal[tuple(ELEMENT_TYPES)]
Op = Literal["sum", "mean", "min", "max", "prod"]
Overlap = Literal["random", "full", "none"]
Distribution = Literal["uniform", "zipf"]
Kind = Literal["auto", "shm", "tcp", "verbs"]
Level = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


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
        meta(
            "address of every aggregator shard; the same list in the same order on every worker. If the list is empty, "
            "rank 0 starts an aggregator for its job, whose ranks must all be on one host"
        ),
    ] = ()
    job: Annotated[
        str,
        meta(
            'name of the job, the same on every worker; "auto" takes the launcher\'s own id, or "default"',
            pattern=JOB_PATTERN,
            allowed=JOB_ALLOWED,
        ),
    ] = "auto"
    launch: Annotated[
        str,
        meta(
            "id of the launch, the same on every worker of a launch: workers of different launches never meet, even if "
            'their jobs have the same name; "auto" takes the id of the launcher, "" does not tell launches apart',
            pattern=LAUNCH_PATTERN,
            allowed=f'"auto", "" or {JOB_ALLOWED}',
        ),
    ] = "auto"
    timeout_s: Annotated[float, meta("longest time that one collective may take", "seconds", ge=0.1, le=86400)] = 60.0
    join_timeout_s: Annotated[
        float, meta("longest time to reach the aggregators and be admitted", "seconds", ge=0.1, le=86400)
    ] = 30.0


class Elastic(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Jobs that go on with other workers after a fault."

    enabled: Annotated[
        bool, meta("survivors may form the job anew, and workers that are started again may join it; on every worker")
    ] = False
    min_ranks: Annotated[int, meta("fewest workers that go on", "workers", ge=1, le=2**20)] = 1
    last_call_s: Annotated[
        float,
        meta(
            "time that survivors wait for others after the last one came; more than a step of training",
            "seconds",
            ge=0,
            le=3600,
        ),
    ] = 5.0


class Transport(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "How bytes travel between workers and aggregators, and between workers of one host."

    kind: Annotated[
        Kind,
        meta('"auto" picks for each link: shm on one host, verbs if both ends have it on the path, else tcp'),
    ] = "auto"
    host_exchange: Annotated[
        Literal["auto", "off"],
        meta(
            '"auto": ranks of one host, and of one user, exchange tensors in memory that they share; if the job has '
            'several hosts, each host then sends the aggregators one sum; "off": this rank sends its own'
        ),
    ] = "auto"
    spin_us: Annotated[
        int,
        meta(
            "time that a thread polls before it sleeps, if it waits for ranks of its own host or for a tensor of up to "
            "1 MiB; for a larger tensor from aggregators it polls for a tenth of this",
            "microseconds",
            ge=0,
            le=1_000_000,
        ),
    ] = 200
    threads: Annotated[
        int, meta("threads of a worker, for different shards; 0: by processors and ranks", "threads", ge=0, le=64)
    ] = 0
    dead_peer_s: Annotated[
        float,
        meta(
            "a tcp peer counts as dead if it acknowledges nothing for this long, or takes no data while its buffers "
            "are full",
            "seconds",
            ge=0.5,
            le=600,
        ),
    ] = 4.0


class Verbs(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "RDMA: which device, and how its connections behave."

    device: Annotated[
        str,
        meta(
            'RDMA device, as `ibv_devices` lists it; "auto" takes the device on the path to the aggregator, else the '
            "first active device (OmniReduce: ib_hca)",
            pattern=r"^[A-Za-z0-9_.-]{1,64}\Z",
            allowed='"auto" or the name of a device',
        ),
    ] = "auto"
    port: Annotated[int, meta("port of the device (OmniReduce: ib_port)", ge=1, le=255)] = 1
    gid_index: Annotated[
        int,
        meta(
            "entry of the port's GID table; -1 takes the entry for RoCE v2 with an IPv4 address (OmniReduce: gid_idx)",
            ge=-1,
            le=65535,
        ),
    ] = -1
    service_level: Annotated[
        int, meta("service level of InfiniBand, priority of RoCE (OmniReduce: sl)", ge=0, le=15)
    ] = 0
    traffic_class: Annotated[int, meta("traffic class: DSCP x 4, for switches with PFC or ECN", ge=0, le=255)] = 0
    path_mtu: Annotated[
        Literal[0, 256, 512, 1024, 2048, 4096], meta("payload of the largest packet; 0: as the port has it", "bytes")
    ] = 0
    ack_timeout: Annotated[
        int, meta("exponent of the wait for an acknowledgement: 4.096 us x 2^n before a retry", ge=1, le=31)
    ] = 16
    retry_count: Annotated[
        int,
        meta("retries before a connection counts as broken; not 7, which means endless to some devices", ge=0, le=6),
    ] = 6


class Queue(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Collectives that ranks submit in any order, by name: torch's optimizer, Keras, `omnireduce.Queue`."

    fusion_bytes: Annotated[
        int,
        meta(
            "small arrays of one type travel together, up to this size in all; 0: each by itself (Horovod: fusion "
            "threshold)",
            "bytes",
            ge=0,
            le=2**30,
        ),
    ] = 1 << 20
    cycle_s: Annotated[
        float,
        meta(
            "time that a rank waits for further arrays before it tells others which arrays are ready (Horovod: cycle "
            "time). If a step is like the step before, ranks need not tell each other",
            "seconds",
            ge=0.0001,
            le=1,
        ),
    ] = 0.001


class Stall(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Ranks that do not come to a collective of the queue while others wait for it."

    warn_s: Annotated[
        float, meta("log which ranks are missing after this long, and again; 0: never", "seconds", ge=0, le=86400)
    ] = 60.0
    abort_s: Annotated[float, meta("end the job after this long; 0: never", "seconds", ge=0, le=86400)] = 600.0


class Bench(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "The program `omnireduce bench`. A list of values is a sweep; several lists sweep over their product."

    elements: Annotated[
        _Elements | Annotated[tuple[_Elements, ...], _AtLeastOne], meta("size of the tensor", "elements")
    ] = 26_214_400
    density: Annotated[
        _Density | Annotated[tuple[_Density, ...], _AtLeastOne],
        meta("non-zero blocks / blocks of each worker's tensor", "fraction"),
    ] = (1.0, 0.1, 0.01)
    dtype: Annotated[Dtype | Annotated[tuple[Dtype, ...], _AtLeastOne], meta("type of the elements")] = "float32"
    op: Annotated[Op | Annotated[tuple[Op, ...], _AtLeastOne], meta("the reduction")] = "sum"
    block_size: Annotated[
        _BenchBlock | Annotated[tuple[_BenchBlock, ...], _AtLeastOne],
        meta("size of a block; 0 takes protocol.block_size", "elements"),
    ] = 0
    overlap: Annotated[
        Overlap | Annotated[tuple[Overlap, ...], _AtLeastOne],
        meta("places of the workers' non-zero blocks: random, the same (full) or disjoint (none)"),
    ] = "random"
    distribution: Annotated[
        Distribution | Annotated[tuple[Distribution, ...], _AtLeastOne],
        meta(
            "blocks that are likely to be non-zero: all (uniform), or the first blocks by Zipf's law (zipf), as in an "
            "embedding whose rows are sorted by frequency"
        ),
    ] = "uniform"
    rounds: Annotated[int, meta("timed rounds of each row", "rounds", ge=1, le=1_000_000)] = 20
    warmup: Annotated[int, meta("rounds before the timed ones", "rounds", ge=0, le=1_000_000)] = 3
    seed: Annotated[int, meta("seed of the data", ge=0, le=_SEED)] = 1


class Train(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "The program `omnireduce train`: word embeddings of the standard library's source files."

    steps: Annotated[int, meta("training steps", "steps", ge=1, le=10_000_000)] = 200
    batch: Annotated[int, meta("skip-gram pairs per rank and step", "pairs", ge=1, le=2**20)] = 256
    dim: Annotated[int, meta("length of a word's vector", "elements", ge=1, le=4096)] = 256
    vocabulary: Annotated[int, meta("most frequent words that are kept", "words", ge=2, le=10_000_000)] = 20_000
    negatives: Annotated[int, meta("negative samples per pair", "words", ge=1, le=100)] = 5
    window: Annotated[int, meta("context on each side of a word", "words", ge=1, le=100)] = 4
    learning_rate: Annotated[float, meta("step size of the descent", ge=1e-6, le=1000)] = 0.05
    max_files: Annotated[
        int, meta("most source files that are read; every tenth is held out", "files", ge=10, le=1_000_000)
    ] = 1000
    seed: Annotated[int, meta("seed of the weights and samples", ge=0, le=_SEED)] = 1


class Trace(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Where the time goes: every worker, and every shard for every job, writes a file when the job is over."

    folder: Annotated[
        str,
        meta(
            'folder for the traces, which `omnireduce trace` reads; "" is off. For diagnosis only: every job of '
            "a daemon leaves files",
            allowed='the path of a folder, or ""',
            path_unless=("",),
            pattern=r"^[^\x00]*\Z",
        ),
    ] = ""
    events: Annotated[
        int,
        meta("room of one trace, 29 bytes for each event; a full trace stops", "events", ge=1, le=2**26),
    ] = 1 << 20
    timeline: Annotated[
        str,
        meta(
            "file for one timeline of all ranks and shards, in the form of Chrome traces (Horovod: HOROVOD_TIMELINE). "
            "Each rank and shard leaves its part in trace.folder or, if that is not set, in the folder FILE.parts; "
            '"DYNAMIC" is "", and leaves it to `start_timeline`; "" is off',
            allowed='the path of a file, "DYNAMIC" or ""',
            path_unless=("", "DYNAMIC"),
            pattern=r"^[^\x00]*\Z",
        ),
    ] = ""
    timeline_cycles: Annotated[
        bool,
        meta("mark in the timeline when a queue looks for tensors to combine (Horovod: HOROVOD_TIMELINE_MARK_CYCLES)"),
    ] = False
    profile: Annotated[
        str,
        meta(
            "folder where every rank leaves a table of its collectives when it ends, omnireduce_profile.RANK; "
            '"1" is the current folder; "" and "0" are off (variable: OMNIREDUCE_PROFILE)',
            allowed='the path of a folder, "1", "0" or ""',
            path_unless=("", "0", "1"),
            pattern=r"^[^\x00]*\Z",
        ),
    ] = ""


class Log(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    MEANING = "Log lines of the programs."

    level: Annotated[Level, meta("least severity that is logged")] = "info"
    format: Annotated[LogFormat, meta("form of a line: key=value pairs (text), or a JSON object (json)")] = "text"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration, immutable and hashable; `load_config` makes a checked configuration."""

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

"""Who serves a job, where, and what each rank's process is: decided before and while it starts."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from omnireduce.config import Config
from omnireduce.config.security import SECRET_VARIABLE
from omnireduce.errors import ConfigError
from omnireduce.files.paths import current_folder
from omnireduce.interpreters import TREE, program_of
from omnireduce.launching.connection import Connection
from omnireduce.launching.environment import (
    as_bytes,
    draw_job,
    draw_secret,
    environ_of_other_host,
    environ_of_ranks,
    of_rank,
    of_service,
)
from omnireduce.launching.hosts import Host, Slot, is_here
from omnireduce.launching.job import AGGREGATOR, Job
from omnireduce.launching.messages import Start

LOOPBACK = "127.0.0.1"
ANYWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): the way there is the way to any other host
EMBEDDED = "embedded"
MOST_SHARDS = 64
_AGGREGATOR = program_of("omnireduce.__main__", name="omnireduce")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants. `aggregators`: a number of shards, EMBEDDED, or None for what the configuration says or what
    the hosts want. `environ` is that of the ranks, before each one's own variables."""

    words: Sequence[str]
    ranks: int
    config: Config
    hosts: Sequence[Host] = ()
    launcher: str = ""
    aggregators: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    ssh: str = "ssh"
    interface: str = ""
    start_timeout_s: float = 30.0
    grace_s: float = 10.0
    output_folder: str | None = None
    timestamps: bool = False
    prefixed: bool = True  # each line of output has its rank before it
    verbose: bool = False
    mpi_args: Sequence[str] = ()
    given: bytes = b""  # to each rank's standard input, for a call of a function
    smallest: int = 0  # elastic when it is more than 0
    discovery_script: str = ""
    slots_per_host: int = 1
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    cooldown_s: tuple[float, float] = (60.0, 3600.0)


def shards_to_start(asked: Asked, hosts: int) -> int:
    """How many shards this job starts for itself; 0: rank 0 starts one, or the configuration names others, which the
    flag overrides. Raises ConfigError for what does not fit together."""
    configured, wanted = bool(asked.config.cluster.aggregators), asked.aggregators
    if wanted is None:
        return 0 if configured or (hosts == 1 and not asked.smallest) else 1
    if wanted == EMBEDDED:
        if hosts > 1 or asked.smallest:
            why = f"the ranks are on {hosts} hosts" if hosts > 1 else "an elastic job wants one that outlives rank 0"
            raise ConfigError(f"--aggregators embedded: {why}; give a number, or leave it out")
        return 0
    if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= MOST_SHARDS):
        raise ConfigError(f"--aggregators: got {wanted[:40]!r}, expected 1 to {MOST_SHARDS}, or embedded")
    return int(wanted)


def check_command(words: Sequence[str], environ: Mapping[str, str], *, is_away: bool = False) -> None:
    """Raise ConfigError unless there is a command, and this host has it, or another host `is_away` that runs it."""
    if not words:
        raise ConfigError("no command: expected one behind the options, such as: omnireduce run -np 2 python train.py")
    if not is_away and shutil.which(words[0], path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(f"{words[0]}: command not found")


def address_of_first(names: Sequence[str], interface: str = "") -> str:
    """Where the other hosts of `names` reach the first one. Raises ConfigError for an interface that has no address."""
    first, *others = names
    if interface:
        if not is_here(first):
            raise ConfigError(
                f"--network-interfaces {interface}: the first host is {first}, not this one; name it in -H by its "
                "address on that network instead"
            )
        return _address_of_interface(interface)
    if not is_here(first):
        return first.rpartition("@")[2]
    away = [each.rpartition("@")[2] for each in others if not is_here(each)]
    return _own_address_towards(away[0]) if away else LOOPBACK


def _own_address_towards(host: str) -> str:
    with suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _address_of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        except OSError as error:
            raise ConfigError(f"--network-interfaces: {name}: {error.strerror}; `ip address` lists them") from None
    return socket.inet_ntoa(found[20:24])


class Plan:
    """The processes of one launch. `address`: where other hosts reach the first one. `is_wide`: others may come."""

    def __init__(self, asked: Asked, names: Sequence[str], *, is_wide: bool = False) -> None:
        self.asked, self.job, self._is_wide = asked, draw_job(), is_wide or len(names) > 1
        self.shards = shards_to_start(asked, len(names))
        self.address = address_of_first([*names, ANYWHERE] if is_wide else names, asked.interface)
        self._folder = os.fsencode(current_folder())
        self.environ = environ_of_ranks(asked.environ or os.environ)
        # where the job's own aggregators are, for ranks
        self.service = {"OMNIREDUCE_CLUSTER_AGGREGATORS": "[]"} if asked.aggregators == EMBEDDED else {}

    def serve(self, job: Job, connection: Connection) -> None:
        """Start this job's own aggregators, if it has any, and wait until they are ready. Raises what
        `Job.await_aggregator` raises."""
        if not self.shards:
            return
        known = self.asked.config.security.secret_file or SECRET_VARIABLE in self.environ
        secret = "" if known else draw_secret()
        environ = self.environ | ({SECRET_VARIABLE: secret} if secret else {})
        if not self.asked.verbose:
            environ = {"OMNIREDUCE_LOG_LEVEL": "warning"} | environ
        listen = LOOPBACK if not self._is_wide else "0.0.0.0"
        words = ["-P", "-c", _AGGREGATOR, "aggregator", "--listen", f"{listen}:0", "--shards", str(self.shards), TREE]
        job.start(AGGREGATOR, connection, self._order(AGGREGATOR, [sys.executable, *words], environ, connection))
        ready = job.await_aggregator()
        host = LOOPBACK if not self._is_wide else self.address
        host = f"[{host}]" if ":" in host else host
        self.service = of_service(tuple(f"{host}:{each.rpartition(':')[2]}" for each in ready), secret)

    def rank(self, slot: Slot, size: int, connection: Connection, port: int) -> Start:
        """The order to start a rank; `port` is where torch's ranks meet, on the first host."""
        environ = self.environ | of_rank(slot, size, self.job, (self.address, port)) | self.service
        return self._order(slot.rank, self.asked.words, environ, connection)

    def command(self, words: Sequence[str], connection: Connection) -> Start:
        """The order to start another launcher."""
        environ = self.environ | {"OMNIRUN_TOLD": "1"} | self.service
        return self._order(0, words, environ, connection)

    def _order(self, number: int, words: Sequence[str], environ: Mapping[str, str], connection: Connection) -> Start:
        remote = connection.is_remote
        return Start(
            number,
            [os.fsencode(word) for word in words],
            as_bytes(environ_of_other_host(environ) if remote else environ),
            self._folder,
            inherits=remote,
            given=self.asked.given if number >= 0 else b"",
            with_result=bool(self.asked.given) and number >= 0,
        )

"""Plan of a launch: its aggregators, their addresses, and the process of each rank. `hosts` places the ranks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from omnireduce.errors import ConfigError
from omnireduce.launch.connection import AGGREGATOR, Connection, Start
from omnireduce.launch.hosts import Host, Slot, is_this_host
from omnireduce.launch.launched_job import LaunchedJob
from omnireduce.launch.rank_variables import (
    environ_as_bytes,
    environ_of_other_host,
    environ_of_ranks,
    new_job_name,
    new_secret,
    variables_of_aggregators,
    variables_of_rank,
)
from omnireduce.support.addresses import (
    ANYWHERE,
    Address,
    addresses_of_interface,
    is_loopback,
    is_numeric,
    is_own_address,
    look_up,
    loopback,
    parse_address,
    reachable_address,
)
from omnireduce.support.child_program_code import TREE, program_of
from omnireduce.support.config import Config
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.files.paths import current_folder

EMBEDDED = "embedded"
MOST_SHARDS = 64
UNKNOWN_ENDS = "", ""  # the addresses of both ends, if they are not known
_AGGREGATOR = program_of("omnireduce.__main__", name="omnireduce")


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The user's request for a launch. `aggregators`: a number of shards, EMBEDDED, or None: by the configuration, or
    by the number of hosts. `environ`: the environment of all ranks, without the variables of each rank."""

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
    given: bytes = b""  # the standard input of each rank, for a call of a function
    min_ranks: int = 0  # elastic if it is more than 0
    discovery_script: str = ""
    slots_per_host: int = 1
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    cooldown_s: tuple[float, float] = (60.0, 3600.0)


def shards_to_start(request: LaunchRequest, hosts: int) -> int:
    """The number of shards that this job starts for itself. 0: rank 0 starts an aggregator, or the configuration names
    aggregators, which the flag overrides. Raises ConfigError for a flag that does not fit the hosts."""
    has_aggregators, requested = bool(request.config.cluster.aggregators), request.aggregators
    if requested is None:
        return 0 if has_aggregators or (hosts == 1 and not request.min_ranks) else 1
    if requested == EMBEDDED:
        if hosts > 1 or request.min_ranks:
            why_not_elastic = "an elastic job needs an aggregator that outlives rank 0"
            reason = f"the ranks are on {hosts} hosts" if hosts > 1 else why_not_elastic
            raise ConfigError(f"--aggregators embedded: {reason}; give a number, or leave it out")
        return 0
    if not re.fullmatch("[0-9]{1,9}", requested) or not 1 <= int(requested) <= MOST_SHARDS:
        raise ConfigError(f"--aggregators: got {requested[:40]!r}, expected 1 to {MOST_SHARDS}, or embedded")
    return int(requested)


def check_command(words: Sequence[str], environ: Mapping[str, str], *, is_away: bool = False) -> None:
    """Raise ConfigError unless there is a command, and this host has it, or another host `is_away` that runs it."""
    if not words:
        raise ConfigError("no command: expected one behind the options, such as: omnireduce run -np 2 python train.py")
    if not is_away and shutil.which(words[0], path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(f"{words[0]}: command not found")


def address_of_first_host(
    names: Sequence[str],
    *,
    may_grow: bool = False,
    interface: str = "",
    connections: Sequence[Connection] = (),
    by_name: bool = False,
) -> str:
    """The address at which the other hosts reach the first of `names`. `may_grow`: further hosts may come later.
    `connections`, which have greeted, may know addresses from ssh. `by_name`: the certificate of the first host is for
    its name. Raises ConfigError if there is no such address."""
    first, *others = names
    if interface:
        return _address_of_interface(interface, first)
    ends_by_host = {connection.host: _ends_of_ssh(connection) for connection in connections if connection.is_remote}
    name = without_user(first)
    if not is_this_host(first):  # its name may mean 127.0.1.1 there, or nothing to the others
        address_there = ends_by_host.get(first, UNKNOWN_ENDS)[1]
        return (
            name
            if not address_there or is_loopback(address_there) or is_numeric(name) or (by_name and _can_resolve(name))
            else address_there
        )
    hosts_elsewhere = [host for host in others if not is_this_host(host)]
    if not hosts_elsewhere and not may_grow:
        return loopback()
    if is_own_address(name):
        return name
    local_addresses = [
        local for local, _ in (ends_by_host.get(host, UNKNOWN_ENDS) for host in hosts_elsewhere) if local
    ]
    address = next(filter(is_own_address, local_addresses), "") or reachable_address(
        [without_user(host) for host in hosts_elsewhere]
    )
    if not address:
        raise ConfigError("this host has no address at which other hosts could reach it; `ip address` lists its own")
    return address


def without_user(name: str) -> str:
    """The host in a name such as user@host."""
    return name.rpartition("@")[2]


def _can_resolve(name: str) -> bool:
    """Whether a host's name is more than an alias in the configuration of ssh."""
    with suppress(OSError):
        return bool(look_up(name))
    return False


def _ends_of_ssh(connection: Connection) -> tuple[str, str]:
    """The addresses of this host and of the other host, as sshd there sees them."""
    words = connection.ssh.split()
    return (words[0], words[2]) if len(words) == 4 and all(map(is_numeric, words[:3:2])) else UNKNOWN_ENDS


def _address_of_interface(name: str, first: str) -> str:
    if not is_this_host(first):
        raise ConfigError(
            f"--network-interfaces {name}: the first host is {first}, not this one; name it in -H by its address on "
            "that network instead"
        )
    try:
        addresses = addresses_of_interface(name)
    except OSError as error:
        raise ConfigError(f"--network-interfaces: {name}: {error.strerror}; `ip address` lists them") from None
    if not addresses:
        raise ConfigError(f"--network-interfaces: {name}: it has no address; `ip address` lists them")
    return addresses[0]


class Plan:
    """The processes of one launch. `may_grow`: other hosts than `names` may come. `address`: the address at which they
    reach the first host."""

    def __init__(self, request: LaunchRequest, names: Sequence[str], *, may_grow: bool = False) -> None:
        self.request, self.job, self._names, self._may_grow = request, new_job_name(), names, may_grow
        self.shards = shards_to_start(request, len(names))
        self.address = ""  # `serve` finds it
        self._folder = os.fsencode(current_folder())
        self.environ = environ_of_ranks(request.environ or os.environ)
        # the variables that give ranks the job's own aggregators
        self.aggregator_variables = {"OMNIREDUCE_CLUSTER_AGGREGATORS": "[]"} if request.aggregators == EMBEDDED else {}

    def serve(self, job: LaunchedJob, connection: Connection) -> None:
        """Start this job's own aggregators, if it has any, and wait until they are ready. All hosts must have greeted.
        Raises ConfigError, and the errors of `LaunchedJob.await_aggregator`."""
        self.address = self.address or address_of_first_host(
            self._names, may_grow=self._may_grow, interface=self.request.interface, connections=job.connections,
            by_name=bool(self.request.config.security.tls_ca),
        )  # fmt: skip
        if not self.shards:
            return
        has_secret = self.request.config.security.secret_file or SECRET_VARIABLE in self.environ
        secret = "" if has_secret else new_secret()
        environ = self.environ | ({SECRET_VARIABLE: secret} if secret else {})
        if not self.request.verbose:
            environ = {"OMNIREDUCE_LOG_LEVEL": "warning"} | environ
        has_other_hosts = self._may_grow or len(self._names) > 1
        listen = Address(ANYWHERE if has_other_hosts else "localhost", 0)
        words = ["-P", "-c", _AGGREGATOR, "aggregator", "--listen", str(listen), "--shards", str(self.shards), TREE]
        job.start(AGGREGATOR, connection, self._order(AGGREGATOR, [sys.executable, *words], environ, connection))
        ready = job.await_aggregator(self.shards)
        host = self.address if has_other_hosts else listen.host
        self.aggregator_variables = variables_of_aggregators(
            tuple(str(Address(host, parse_address(address).port)) for address in ready), secret
        )

    def rank(self, slot: Slot, size: int, connection: Connection, port: int) -> Start:
        """The order to start a rank; `port`: the port on the first host where torch's ranks meet."""
        environ = (
            self.environ | variables_of_rank(slot, size, self.job, (self.address, port)) | self.aggregator_variables
        )
        return self._order(slot.rank, self.request.words, environ, connection)

    def command(self, words: Sequence[str], connection: Connection) -> Start:
        """The order to start another launcher."""
        environ = self.environ | {"OMNIRUN_TOLD": "1"} | self.aggregator_variables
        return self._order(0, words, environ, connection)

    def _order(self, number: int, words: Sequence[str], environ: Mapping[str, str], connection: Connection) -> Start:
        remote = connection.is_remote
        return Start(
            number,
            [os.fsencode(word) for word in words],
            environ_as_bytes(environ_of_other_host(environ) if remote else environ),
            self._folder,
            inherits=remote,
            given=self.request.given if number >= 0 else b"",
            with_result=bool(self.request.given) and number >= 0,
        )

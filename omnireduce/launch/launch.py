"""A launch from its first process to its exit status."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from omnireduce.errors import ConfigError
from omnireduce.launch.connection import STDERR, STDOUT, Connection, goes_by_ssh, words_of_supervisor
from omnireduce.launch.hosts import Host, place
from omnireduce.launch.job import Job
from omnireduce.launch.loop import watch_input
from omnireduce.launch.output import Descriptor, Plain, Prefixed, Sink
from omnireduce.launch.plan import LaunchRequest, Plan, check_command
from omnireduce.support import processors
from omnireduce.support.config import Config
from omnireduce.support.interpreters import TREE

HERE = "localhost"
RANKS_AT_ONCE = 32  # ranks that are started before the job handles events
RANKS_PER_PROCESSOR = 4  # the most for measurements
STARTED_BY_US = ("", "local", "ssh")  # launchers whose ranks this program starts itself


def connect(names: Sequence[str], asked: LaunchRequest, stack: ExitStack) -> list[Connection]:
    """A supervisor on each host. Raises ConfigError, and TransportError."""
    connections = []
    for name in names:
        by_ssh = goes_by_ssh(name, asked.launcher)
        if by_ssh and asked.launcher == "local":
            raise ConfigError(f"--launcher local, and -H names {name}, which is another host: use --launcher ssh")
        words = words_of_supervisor(name, asked.ssh, asked.grace_s, by_ssh=by_ssh)
        connections.append(Connection(name, words, is_remote=by_ssh))
        stack.callback(connections[-1].kill)
    return connections


def start_ranks(job: Job, asked: LaunchRequest) -> None:
    """Start the aggregators of the job and all ranks. Raises OmniReduceError; InterruptedLaunchError."""
    hosts = asked.hosts or [Host(HERE, asked.ranks)]
    slots = place(hosts, asked.ranks)
    by_name = {connection.host: connection for connection in job.connections}
    plan = Plan(asked, list(by_name))
    job.greet(asked.start_timeout_s)
    first = job.connections[0]
    plan.serve(job, first)
    for slot in slots:
        if slot.rank % RANKS_AT_ONCE == 0:
            job.check()
        if job.is_over:  # a rank has failed already
            return
        connection = by_name[slot.host]
        job.start(slot.rank, connection, plan.rank(slot, asked.ranks, connection, first.port))


def names_of_hosts(asked: LaunchRequest) -> list[str]:
    """The hosts of the ranks, in order."""
    hosts = asked.hosts or [Host(HERE, asked.ranks)]
    return list(dict.fromkeys(slot.host for slot in place(hosts, asked.ranks)))


def prefixed(asked: LaunchRequest, sinks: dict[int, Sink]) -> Prefixed:
    """The output for lines of ranks, with prefixes. Raises ConfigError."""
    return Prefixed(sinks, timestamps=asked.timestamps, folder=asked.output_folder, ranks=asked.ranks)


def launch(asked: LaunchRequest, begin: Callable[[Job, LaunchRequest], None] = start_ranks) -> int:
    """Run a command as all ranks, and return the exit status: 0, the status of the first rank that failed, or 128 + the
    signal that ended it or this process. Output goes to the output of this process. Raises OmniReduceError."""
    names = names_of_hosts(asked) if asked.launcher in STARTED_BY_US else [HERE]
    check_command(asked.words, asked.environ, is_away=goes_by_ssh(names[0], asked.launcher))
    sinks = {STDOUT: Descriptor(1), STDERR: Descriptor(2)}
    output = prefixed(asked, dict(sinks)) if asked.launcher in STARTED_BY_US and asked.prefixed else Plain(dict(sinks))
    with ExitStack() as stack:
        connections = connect(names, asked, stack)
        job = stack.enter_context(Job(connections, output, grace_s=asked.grace_s, descriptors=list(sinks.values())))
        if not asked.given:
            watch_input(job)
        return job.carry_out(lambda: begin(job, asked))


def _check_processors(ranks: int) -> None:
    quota = processors.quota()
    here = processors.usable() if quota is None else min(processors.usable(), math.ceil(quota))
    most = RANKS_PER_PROCESSOR * here
    if ranks > most:
        raise ConfigError(f"-np {ranks}: expected at most {most}, for this host has {here} processors for the ranks")


def launch_for_result(program: str, np: int, config: Config, given: object, **more: Any) -> tuple[int, bytes]:
    """Run the text `program` as each of `np` ranks, which get `given` as JSON by standard input. Returns the exit
    status, and the result that rank 0 has written to its pipe. `more`: further fields of `LaunchRequest`.

    Raises ConfigError if there are too many ranks for this host to measure anything.
    """
    _check_processors(np)
    jobs = list[Job]()

    def begin(job: Job, asked: LaunchRequest) -> None:
        jobs.append(job)
        start_ranks(job, asked)

    asked = LaunchRequest(
        words=[sys.executable, "-c", program, TREE], ranks=np, config=config, environ=dict(os.environ),
        given=msgspec.json.encode(given), prefixed=False, **more,
    )  # fmt: skip
    status = launch(asked, begin)
    return status, b"" if status else bytes(jobs[0].ranks[0].result)

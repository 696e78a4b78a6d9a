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
from omnireduce.launch.connection import STDERR, STDOUT, Connection, needs_ssh, supervisor_command
from omnireduce.launch.hosts import Host, place_ranks
from omnireduce.launch.launched_job import LaunchedJob
from omnireduce.launch.loop import watch_input
from omnireduce.launch.output import DescriptorSink, PrefixedOutput, Sink, UnchangedOutput
from omnireduce.launch.plan import LaunchRequest, Plan, check_command
from omnireduce.support import processors
from omnireduce.support.child_program_code import TREE
from omnireduce.support.config import Config

LOCALHOST = "localhost"
RANKS_AT_ONCE = 32  # ranks that are started before the job handles events
RANKS_PER_PROCESSOR = 4  # the most for measurements
STARTED_BY_US = ("", "local", "ssh")  # launchers whose ranks this program starts itself


def connect(names: Sequence[str], request: LaunchRequest, stack: ExitStack) -> list[Connection]:
    """A supervisor on each host. Raises ConfigError, and TransportError."""
    connections = []
    for name in names:
        by_ssh = needs_ssh(name, request.launcher)
        if by_ssh and request.launcher == "local":
            raise ConfigError(f"--launcher local, and -H names {name}, which is another host: use --launcher ssh")
        words = supervisor_command(name, request.ssh, request.grace_s, is_remote=by_ssh)
        connections.append(Connection(name, words, is_remote=by_ssh))
        stack.callback(connections[-1].kill)
    return connections


def start_ranks(job: LaunchedJob, request: LaunchRequest) -> None:
    """Start the aggregators of the job and all ranks. Raises OmniReduceError; InterruptedLaunchError."""
    hosts = request.hosts or [Host(LOCALHOST, request.ranks)]
    slots = place_ranks(hosts, request.ranks)
    by_name = {connection.host: connection for connection in job.connections}
    plan = Plan(request, list(by_name))
    job.greet(request.start_timeout_s)
    first_connection = job.connections[0]
    plan.serve(job, first_connection)
    for slot in slots:
        if slot.rank % RANKS_AT_ONCE == 0:
            job.check()
        if job.is_ending:  # a rank has failed already
            return
        connection = by_name[slot.host]
        job.start(slot.rank, connection, plan.rank(slot, request.ranks, connection, first_connection.port))


def names_of_hosts(request: LaunchRequest) -> list[str]:
    """The hosts of the ranks, in order."""
    hosts = request.hosts or [Host(LOCALHOST, request.ranks)]
    return list(dict.fromkeys(slot.host for slot in place_ranks(hosts, request.ranks)))


def make_prefixed_output(request: LaunchRequest, sinks: dict[int, Sink]) -> PrefixedOutput:
    """The output for lines of ranks, with prefixes. Raises ConfigError."""
    return PrefixedOutput(sinks, timestamps=request.timestamps, folder=request.output_folder, ranks=request.ranks)


def launch(request: LaunchRequest, begin: Callable[[LaunchedJob, LaunchRequest], None] = start_ranks) -> int:
    """Run a command as all ranks, and return the exit status: 0, the status of the first rank that failed, or 128 + the
    signal that ended it or this process. Output goes to the output of this process. Raises OmniReduceError."""
    names = names_of_hosts(request) if request.launcher in STARTED_BY_US else [LOCALHOST]
    check_command(request.words, request.environ, is_away=needs_ssh(names[0], request.launcher))
    sinks = {STDOUT: DescriptorSink(1), STDERR: DescriptorSink(2)}
    output = (
        make_prefixed_output(request, dict(sinks))
        if request.launcher in STARTED_BY_US and request.prefixed
        else UnchangedOutput(dict(sinks))
    )
    with ExitStack() as stack:
        connections = connect(names, request, stack)
        job = stack.enter_context(
            LaunchedJob(connections, output, grace_s=request.grace_s, descriptors=list(sinks.values()))
        )
        if not request.given:
            watch_input(job)
        return job.carry_out(lambda: begin(job, request))


def _check_processors(ranks: int) -> None:
    quota = processors.quota()
    local_processors = processors.usable() if quota is None else min(processors.usable(), math.ceil(quota))
    max_ranks = RANKS_PER_PROCESSOR * local_processors
    if ranks > max_ranks:
        raise ConfigError(
            f"-np {ranks}: expected at most {max_ranks}, for this host has {local_processors} processors for the ranks"
        )


def launch_for_result(program: str, np: int, config: Config, stdin_object: object, **fields: Any) -> tuple[int, bytes]:
    """Run the text `program` as each of `np` ranks, which get `stdin_object` as JSON by standard input. Returns the
    exit status, and the result that rank 0 has written to its pipe. `fields`: further fields of `LaunchRequest`.

    Raises ConfigError if there are too many ranks for this host to measure anything.
    """
    _check_processors(np)
    jobs = list[LaunchedJob]()

    def begin(job: LaunchedJob, request: LaunchRequest) -> None:
        jobs.append(job)
        start_ranks(job, request)

    request = LaunchRequest(
        words=[sys.executable, "-c", program, TREE], ranks=np, config=config, environ=dict(os.environ),
        given=msgspec.json.encode(stdin_object), prefixed=False, **fields,
    )  # fmt: skip
    status = launch(request, begin)
    return status, b"" if status else bytes(jobs[0].ranks[0].result)

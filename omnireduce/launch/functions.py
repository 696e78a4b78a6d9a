"""`omnireduce.run`: calls a function on all ranks, in place of a command, and returns the result of each rank.

The function is sent by cloudpickle, so a notebook may define it. A rank reads it from its standard input, and writes
the result to a separate pipe (`function_rank`). This process has started the processes at both ends.
"""

from __future__ import annotations

import pickle
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from omnireduce.errors import AbortedError, ConfigError, RankFailedError, UsageError
from omnireduce.launch.command import parse_command_line
from omnireduce.launch.command import run as command
from omnireduce.launch.connection import STDERR, STDOUT
from omnireduce.launch.launch import STARTED_BY_US, connect, make_prefixed_output, names_of_hosts, start_ranks
from omnireduce.launch.launched_job import LaunchedJob
from omnireduce.launch.launched_rank import LaunchedRank, how_it_ended
from omnireduce.launch.output import TextSink
from omnireduce.launch.plan import LaunchRequest
from omnireduce.support.child_program_code import TREE, program_of
from omnireduce.support.config import Config
from omnireduce.support.extras import install
from omnireduce.support.load_by_name import search_path

_PRINTING_OPTIONS = ("check_build", "version")
_HOROVOD = {"use_mpi": "mpi", "use_gloo": "gloo", "cooldown_range": "blacklist_cooldown_range"}


def read_keywords(keywords: Mapping[str, Any]) -> LaunchRequest:
    """The request of keywords that are named like flags, for ranks that call a function. None and False count as
    absent. Raises UsageError for a keyword that is no flag, for a value that the flag does not allow, and for flags
    that only make sense for a command; ConfigError for values that do not fit together."""
    options = [
        option for option in command.params if isinstance(option, click.Option) and option.name not in _PRINTING_OPTIONS
    ]
    flags = {flag.lstrip("-").replace("-", "_"): (flag, option) for option in options for flag in option.opts}
    words: list[str] = []
    for name, value in keywords.items():
        if value is None or value is False:
            continue
        flag_and_option = flags.get(_HOROVOD.get(name, name))
        if flag_and_option is None:
            raise UsageError(f"{name}: not an option of omnireduce.run; `omnireduce run --help` lists them")
        words += _words(name, *flag_and_option, value)
    if len([name for name in ("np", "num_proc") if keywords.get(name) is not None]) > 1:
        raise UsageError("np and num_proc: expected one of them")
    try:
        request = parse_command_line(words, 1)
    except click.UsageError as error:
        raise UsageError(error.format_message()) from None
    if request.launcher not in STARTED_BY_US:
        raise UsageError(f"launcher {request.launcher}: omnireduce.run starts ranks itself; expected local or ssh")
    if request.min_ranks:
        raise UsageError("min_np: ranks of a function do not come and go; start a program by omnireduce run --min-np")
    return request


def _words(name: str, flag: str, option: click.Option, value: Any) -> Iterator[str]:
    """The words of a command line for this flag and value. Raises UsageError."""
    if option.is_flag:
        if not isinstance(value, int):
            raise UsageError(f"{name}: got {value!r}, expected True or False")
        if value:
            yield flag
    elif option.multiple:
        if isinstance(value, Mapping):
            value = [f"{key}={setting}" for key, setting in value.items()]
        for word in [value] if isinstance(value, str) else value:
            yield from (flag, str(word))
    elif option.name == "ssh" and not isinstance(value, str):
        yield from (flag, shlex.join(value))
    elif isinstance(value, list | tuple):
        yield from (flag, *map(str, value)) if option.nargs > 1 else (flag, ",".join(map(str, value)))
    else:
        yield from (flag, str(value))


R = TypeVar("R")
PROGRAM = program_of("omnireduce.launch.function_rank")


def run(
    func: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    config: str | Path | Config | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    **options: Any,
) -> list[R]:
    """Call `func(*args, **kwargs)` on `np` ranks, and return a list with the result of each rank, in their order.

    The ranks are processes on this host, or on `hosts` ("node1:4,node2:4", by ssh). Without `np` there are as many as
    the hosts have slots, or 1. `func` calls `omnireduce.init` itself. It may be defined in a notebook. `config`: as in
    `init`; a Config only gives the addresses of aggregators, because ranks read their own configuration. `env`:
    variables of ranks, which replace or add to those of this process. Output of ranks goes to `stdout` and `stderr`, by
    default those of `sys`, with the rank before each line.

    `options` are those of `omnireduce run`, such as `aggregators=2`, `start_timeout=60` or `output_filename="logs"`,
    and the keywords of `horovod.run`.

    Raises RankFailedError with the traceback of the first rank that raised; ConfigError; UsageError for a function or
    arguments that cannot be sent, and for invalid options; TransportError for a host that cannot be reached. No process
    is left in any case.
    """
    if isinstance(config, str | Path):
        options["config"] = str(config)
    executable = options.pop("executable", None) or sys.executable
    request = read_keywords({"np": np, "hosts": hosts, **options})
    request = replace(
        request,
        words=[executable, "-c", PROGRAM, TREE],
        config=config if isinstance(config, Config) else request.config,
        environ={**request.environ, **(env or {})},
        given=pack_call(func, args, kwargs or {}),
    )
    out, err = stdout or sys.stdout, stderr or sys.stderr
    output = make_prefixed_output(request, {STDOUT: TextSink(out.write), STDERR: TextSink(err.write)})
    with ExitStack() as stack:
        connections = connect(names_of_hosts(request), request, stack)
        job = stack.enter_context(LaunchedJob(connections, output, grace_s=request.grace_s))
        start_ranks(job, request)
        job.run()
        job.complain()
    return results_of(job)


def pack_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes. Raises ConfigError without cloudpickle, UsageError for a call that cannot be pickled."""
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(f"omnireduce.run needs cloudpickle: {install('cloudpickle', 'launch')}") from None
    try:
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
    except Exception as error:  # objects of the user may raise anything
        raise UsageError(f"the function or its arguments cannot be sent to ranks: {error}") from error
    return pickle.dumps((search_path(), call))


def results_of(job: LaunchedJob) -> list[Any]:
    """The results of all ranks, in their order. Raises RankFailedError for the rank to blame: a rank whose exception is
    not about another rank."""
    ranks = sorted((rank for rank in job.ranks.values() if rank.number >= 0), key=lambda rank: rank.number)
    outcomes = {rank.number: _read_result(rank) for rank in ranks}
    failed = [(number, outcome) for number, outcome in outcomes.items() if outcome is not None and not outcome[0]]
    if failed:
        first = job.failed.number if job.failed is not None else failed[0][0]
        # An AbortedError is about another rank, so any other error counts before it.
        number, (_, error, text) = min(
            failed, key=lambda failure: (isinstance(failure[1][1], AbortedError), failure[0] != first, failure[0])
        )
        raise RankFailedError(f"rank {number} raised an exception:", number, text) from error
    for rank in [job.failed] if job.failed is not None else ranks:
        if rank.status or outcomes.get(rank.number) is None:
            process = f"rank {rank.number}" if rank.number >= 0 else "the aggregator of the job"
            end = how_it_ended(rank, rank.status) if rank.status else "ended before it returned"
            raise RankFailedError(f"{process} {end}", rank.number)
    return [outcome[1] for outcome in outcomes.values() if outcome is not None]


def _read_result(rank: LaunchedRank) -> tuple[bool, Any, str] | None:
    """Whether the function returned, its result or exception, and the traceback; None for a rank that died before."""
    if not rank.result:
        return None
    try:
        is_well, value, text = pickle.loads(bytes(rank.result))
        if isinstance(value, bytes):
            value = pickle.loads(value)
    except Exception as error:
        if rank.status:
            return None
        raise UsageError(f"the result of rank {rank.number} cannot be read here: {error}") from error
    return is_well, value, text

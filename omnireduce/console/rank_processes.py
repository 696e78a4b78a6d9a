"""Work of a command that several ranks of this host do together, each in a process of its own.

The work is a module with `Request`, which has all that a rank must know, and `run(request, config)`. The command calls
`run_on_ranks`. Each rank runs `main`. The result of rank 0 goes back to the command.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TypeVar

import msgspec

from omnireduce.errors import UsageError
from omnireduce.launch.connection import RESULT_FD
from omnireduce.launch.launch import launch_for_result
from omnireduce.support.child_program_code import program_of
from omnireduce.support.cli import reporting_errors
from omnireduce.support.config import Config, load_config
from omnireduce.support.logs import start_logs


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Base of each `Request`: the configuration as the command line gives it."""

    config_file: str | None
    overrides: tuple[str, ...]


class Work(msgspec.Struct, frozen=True):
    """The standard input of a rank: the dotted name of the module, and its request as JSON."""

    module: str
    request: msgspec.Raw


Result = TypeVar("Result")


def run_on_ranks(
    request: RankRequest, ranks: int, config: Config, result: type[Result], *, shards: int | None = None
) -> Result:
    """Run the module of `request` on so many ranks. Returns the result of rank 0, of the type `result`. `shards`: start
    an aggregator with so many shards; None leaves that to the configuration and rank 0.

    Ends this process with the status of the first rank that fails. Raises ConfigError for more ranks than processors
    can carry, and UsageError if rank 0 ends without a result.
    """
    work = Work(type(request).__module__, msgspec.Raw(msgspec.json.encode(request)))
    aggregators = None if shards is None else str(shards)
    status, data = launch_for_result(program_of(__name__), ranks, config, work, aggregators=aggregators)
    if status:
        sys.exit(status)
    if not data:
        raise UsageError("rank 0 ended without a result")
    return msgspec.json.decode(data, type=result)


def main() -> None:
    """The process of a rank. It reads its work as JSON from standard input, and writes the result to a pipe."""
    pipe = int(os.environ.pop(RESULT_FD))
    os.set_inheritable(pipe, False)
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    with reporting_errors():
        module = import_module(work.module)
        request = msgspec.json.decode(work.request, type=module.Request)
        config = load_config(request.config_file, overrides=request.overrides)
        start_logs(config.log)
        result = module.run(request, config)
        with open(pipe, "wb") as file:
            file.write(msgspec.json.encode(result))

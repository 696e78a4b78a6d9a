"""Ranks of an elastic job that tests kill and start again."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from local_cluster import WAIT_S, Daemon, Process, unique_job


class Ranks:
    """Processes of one elastic job: a Python program."""

    def __init__(
        self, daemon: Daemon, stack: ExitStack, size: int, min_ranks: int, *command: str, **environ: str
    ) -> None:
        self._stack, self._command = stack, command
        self._environ = {
            "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses),
            "OMNIREDUCE_CLUSTER_JOB": unique_job("elastic"),
            "OMNIREDUCE_ELASTIC_ENABLED": "true",
            "OMNIREDUCE_ELASTIC_MIN_RANKS": str(min_ranks),
            "OMNIREDUCE_ELASTIC_LAST_CALL_S": "0.5",
            "OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S": str(4 * WAIT_S),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
            **environ,
        }

    def start(self, rank: int, *more: str) -> Process:
        """`more`: further words of the command."""
        environ = {**self._environ, "RANK": str(rank)}
        return self._stack.enter_context(Process(sys.executable, *self._command, *more, environ=environ))


def until(process: Process, words: str) -> str:
    """The next line that contains `words`."""
    while words not in (line := process.line(4 * WAIT_S)):
        pass
    return line

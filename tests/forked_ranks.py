"""Ranks on this host with the variables of `omnireduce run`, forked from a process that has imported what they need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from free_ports import free_ports
from local_cluster import ROOT, WAIT_S, Process, unique_job

from omnireduce.launch.hosts import Host, place_ranks
from omnireduce.launch.rank_variables import variables_of_rank
from omnireduce.support.config import Protocol


class Ended(NamedTuple):
    """The end of a rank."""

    status: int
    out: str
    err: str


def run_ranks(
    words: Sequence[str], size: int, *, folder: Path = ROOT, preloaded: tuple[str, ...] = (), **environ: str
) -> list[Ended]:
    """Run `python` with these words on so many ranks, to their end. Small tensors go where users' go."""
    environ = {"OMNIREDUCE_PROTOCOL_WHOLE_BYTES": str(Protocol().whole_bytes)} | environ
    job, meet = unique_job(), ("127.0.0.1", free_ports())
    with ExitStack() as stack:
        ranks = []
        for slot in place_ranks([Host("localhost", size)], size):
            variables = environ | variables_of_rank(slot, size, job, meet)
            rank = Process(sys.executable, *words, environ=variables, folder=folder, preloaded=preloaded)
            ranks.append(stack.enter_context(rank))
        outs = [rank.rest(4 * WAIT_S) for rank in ranks]
        return [Ended(rank.wait(), out, rank.log) for rank, out in zip(ranks, outs, strict=True)]

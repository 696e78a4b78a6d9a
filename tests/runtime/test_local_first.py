"""One rank of each host goes first."""

from __future__ import annotations

from local_cluster import Ranks, unique_job

from omnireduce import AbortedError, Communicator, Config
from omnireduce.runtime.rank.global_communicator import first_of_host


def outcomes(config: Config, trace: list[str], *, fails: bool) -> list[object]:
    """Three ranks of one host go through a block, of which the first one may fail."""
    job = unique_job()

    def run(rank: int) -> None:
        with (
            Communicator(config, rank=rank, size=3, local_rank=rank, job=job) as comm,
            first_of_host(comm.local_rank == 0, comm.barrier) as first,
        ):
            trace.append(f"{rank} {first}")
            if fails:
                raise ValueError("the disk is full")

    return Ranks(3, run).outcomes()


def test_the_others_of_a_host_follow_the_first(local: Config) -> None:
    trace: list[str] = []
    assert outcomes(local, trace, fails=False) == [None] * 3
    assert trace[0] == "0 True"
    assert sorted(trace[1:]) == ["1 False", "2 False"]


def test_if_the_first_fails_the_others_are_not_let_in(local: Config) -> None:
    trace: list[str] = []
    first, *others = outcomes(local, trace, fails=True)
    assert isinstance(first, ValueError)
    assert all(isinstance(each, AbortedError) and "the disk is full" in str(each) for each in others)
    assert trace == ["0 True"]
